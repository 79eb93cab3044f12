"""Row-wise operations in one launch each: RMSNorm, addition with RMSNorm, gated activations, and the rotation
of queries and keys, which also writes keys and values to their pages.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from manylora.kernels.cuda.arithmetic import _to_e4m3, as_bytes
from manylora.kernels.cuda.launch import launch
from manylora.kernels.spec import FP8, AttentionBatch, Rotary


@triton.jit
def _rms_norm(
    x, delta, weight, total, out, eps, ADDED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    values = tl.load(x + row * WIDTH + column, mask=inside, other=0).to(tl.float32)
    if ADDED:
        values += tl.load(delta + row * WIDTH + column, mask=inside, other=0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + row * WIDTH + column, rounded, mask=inside)
        values = rounded.to(tl.float32)
    scaled = values * tl.rsqrt(tl.sum(values * values, axis=0) / WIDTH + eps)
    # Rounded before the weight, as the checkpoints were trained.
    normed = scaled.to(weight.dtype.element_ty).to(tl.float32)
    weights = tl.load(weight + column, mask=inside, other=0).to(tl.float32)
    tl.store(out + row * WIDTH + column, (normed * weights).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gated(y, out, y_stride, WIDTH: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    up = tl.load(y + row * y_stride + column, mask=inside, other=0).to(tl.float32)
    gate = tl.load(y + row * y_stride + WIDTH + column, mask=inside, other=0).to(tl.float32)
    if KIND == "silu":
        active = gate * tl.sigmoid(gate)
    elif KIND == "gelu":
        active = 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476))
    elif KIND == "gelu_tanh":  # (1 + tanh(z)) / 2 is the logistic function of 2 z
        active = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        tl.static_assert(KIND == "relu" or KIND == "relu2")
        active = tl.maximum(gate, 0.0)
        if KIND == "relu2":
            active = active * active
    rounded = active.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * WIDTH + column, (rounded * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _clamped_swiglu(y, out, y_stride, alpha, limit, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    up = tl.load(y + row * y_stride + column, mask=inside, other=0).to(tl.float32)
    gate = tl.load(y + row * y_stride + WIDTH + column, mask=inside, other=0).to(tl.float32)
    up, gate = tl.minimum(tl.maximum(up, -limit), limit), tl.minimum(gate, limit)
    mixed = (up + 1) * gate * tl.sigmoid(alpha * gate)
    tl.store(out + row * WIDTH + column, mixed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotated(x, cos, sin, row, d, DIM: tl.constexpr, HALF: tl.constexpr):
    """One head, in float32; x points to it. Elements from 2 * HALF on are left as they are."""
    values = tl.load(x + d, mask=d < DIM, other=0).to(tl.float32)
    if HALF > 0:
        turned = d < 2 * HALF
        other = tl.load(x + tl.where(d < HALF, d + HALF, d - HALF), mask=turned, other=0).to(tl.float32)
        angle = row * (2 * HALF) + d
        c = tl.load(cos + angle, mask=turned, other=0).to(tl.float32)
        s = tl.load(sin + angle, mask=turned, other=0).to(tl.float32)
        values = tl.where(turned, values * c + tl.where(d < HALF, -other, other) * s, values)
    return values


@triton.jit
def _rotate_store(
    q, k, v, cos, sin, q_out, k_cache, v_cache, slots, q_row, q_head, k_row, k_head, v_row, v_head,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    NARROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, BLOCK)
    inside = d < DIM
    if head >= KV_HEADS:  # a query's
        number = head - KV_HEADS
        turned = _rotated(q + row * q_row + number * q_head, cos, sin, row, d, DIM, HALF)
        to = q_out + (row * HEADS + number) * DIM + d
        tl.store(to, turned.to(q_out.dtype.element_ty), mask=inside)
    else:
        slot = tl.load(slots + row)
        if slot >= 0:
            to = (slot * KV_HEADS + head) * DIM + d
            # Rounded to the keys' dtype before they are narrowed to 8 bits, as the reference does.
            keys = _rotated(k + row * k_row + head * k_head, cos, sin, row, d, DIM, HALF).to(
                k.dtype.element_ty
            )
            values = tl.load(v + row * v_row + head * v_head + d, mask=inside, other=0)
            if NARROW:
                keys, values = _to_e4m3(keys.to(tl.float32)), _to_e4m3(values.to(tl.float32))
            tl.store(k_cache + to, keys, mask=inside)
            tl.store(v_cache + to, values, mask=inside)


def warps_of(block: int) -> int:
    """Warps for a program that processes a row, whose elements should fit in registers."""
    return 4 if block <= 2048 else 8 if block <= 8192 else 16


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `ReferenceOps.rms_norm`, with any leading dimensions."""
    return add_rms_norm(x, None, weight, eps)[1]


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `ReferenceOps.add_rms_norm`, in one launch. Without a delta the sum is x itself."""
    x = x.contiguous()
    total, out = x if delta is None else torch.empty_like(x), torch.empty_like(x)
    width = x.shape[-1]
    block = triton.next_power_of_2(width)
    if x.numel():
        launch(
            _rms_norm, (x.numel() // width,), x, x if delta is None else delta.contiguous(), weight, total,
            out, eps,
            ADDED=delta is not None, WIDTH=width, BLOCK=block, num_warps=warps_of(block),
        )  # fmt: skip
    return total, out


def gated(y: Tensor, activation: str) -> Tensor:
    """As `ReferenceOps.gated`."""
    return _halve(_gated, y, KIND=activation)


def clamped_swiglu(y: Tensor, alpha: float, limit: float) -> Tensor:
    """As `ReferenceOps.clamped_swiglu`."""
    return _halve(_clamped_swiglu, y, alpha, limit)


def _halve(kernel: Any, y: Tensor, *numbers: float, **options: str) -> Tensor:
    rows, width = y.shape[0], y.shape[1] // 2
    out = torch.empty((rows, width), dtype=y.dtype, device=y.device)
    block = min(1024, triton.next_power_of_2(width))
    if rows:
        grid = rows, triton.cdiv(width, block)
        launch(kernel, grid, y, out, y.stride(0), *numbers, WIDTH=width, BLOCK=block, **options)
    return out


def rotate_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotary: Rotary | None,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
) -> Tensor:
    """As in `ReferenceOps`; caches contiguous. Rows with slot -1 are not stored."""
    rows, heads, dim = q.shape
    kv_heads = k.shape[1]
    if rotary is None:
        cos = sin = out = q
    else:
        cos, sin = rotary
        out = torch.empty((rows, heads, dim), dtype=q.dtype, device=q.device)
    launch(
        _rotate_store, (rows, kv_heads if rotary is None else kv_heads + heads), q, k, v, cos, sin, out,
        as_bytes(k_cache), as_bytes(v_cache), batch.slots, q.stride(0), q.stride(1),
        k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, HALF=0 if rotary is None else cos.shape[1] // 2,
        NARROW=k_cache.dtype == FP8, BLOCK=triton.next_power_of_2(dim), num_warps=1,
    )  # fmt: skip
    return out
