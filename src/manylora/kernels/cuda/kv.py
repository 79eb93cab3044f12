"""Rotates queries and keys, and writes keys and values to their pages, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from manylora.kernels.cuda.fp8 import _to_e4m3, as_bytes
from manylora.kernels.cuda.launch import launch
from manylora.kernels.spec import FP8, Rotary


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


def rotate_and_store(
    q: Tensor, k: Tensor, v: Tensor, rotary: Rotary | None, k_cache: Tensor, v_cache: Tensor, slots: Tensor
) -> Tensor:
    """As in `ReferenceOps`; caches contiguous; slots [T] int64. Rows with slot -1 are not stored."""
    rows, heads, dim = q.shape
    kv_heads = k.shape[1]
    if rotary is None:
        cos = sin = out = q
    else:
        cos, sin = rotary
        out = torch.empty((rows, heads, dim), dtype=q.dtype, device=q.device)
    launch(
        _rotate_store, (rows, kv_heads if rotary is None else kv_heads + heads), q, k, v, cos, sin, out,
        as_bytes(k_cache), as_bytes(v_cache), slots, q.stride(0), q.stride(1),
        k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, HALF=0 if rotary is None else cos.shape[1] // 2,
        NARROW=k_cache.dtype == FP8, BLOCK=triton.next_power_of_2(dim), num_warps=1,
    )  # fmt: skip
    return out
