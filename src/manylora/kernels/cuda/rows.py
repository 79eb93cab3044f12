"""Row-wise operations in one launch each, in float32: RMSNorm, addition with RMSNorm, gated activations."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from manylora.kernels.cuda.launch import launch


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
