"""Row-wise operations in one launch each: RMSNorm and the rotary embedding, in float32, rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["rms_norm", "rotary"]


@triton.jit
def _rms_norm(x, weight, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    values = tl.load(x + row * WIDTH + column, mask=inside, other=0).to(tl.float32)
    scaled = values * tl.rsqrt(tl.sum(values * values, axis=0) / WIDTH + eps)
    # Rounded before the weight, as the checkpoints were trained.
    rounded = scaled.to(weight.dtype.element_ty).to(tl.float32)
    weights = tl.load(weight + column, mask=inside, other=0).to(tl.float32)
    tl.store(out + row * WIDTH + column, (rounded * weights).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotary(x, cos, sin, out, x_stride, HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, BLOCK)
    inside = d < HALF
    source, target = x + row * x_stride + head * 2 * HALF + d, out + (row * HEADS + head) * 2 * HALF + d
    angle = row * 2 * HALF + d
    x1 = tl.load(source, mask=inside, other=0).to(tl.float32)
    x2 = tl.load(source + HALF, mask=inside, other=0).to(tl.float32)
    c1 = tl.load(cos + angle, mask=inside, other=0).to(tl.float32)
    c2 = tl.load(cos + angle + HALF, mask=inside, other=0).to(tl.float32)
    s1 = tl.load(sin + angle, mask=inside, other=0).to(tl.float32)
    s2 = tl.load(sin + angle + HALF, mask=inside, other=0).to(tl.float32)
    tl.store(target, (x1 * c1 - x2 * s1).to(out.dtype.element_ty), mask=inside)
    tl.store(target + HALF, (x2 * c2 + x1 * s2).to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `Ops.rms_norm`; any leading dimensions."""
    x = x.contiguous()
    out = torch.empty_like(x)
    width = x.shape[-1]
    if x.numel():
        grid = (x.numel() // width,)
        _rms_norm[grid](x, weight, out, eps, WIDTH=width, BLOCK=triton.next_power_of_2(width))
    return out


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As `Ops.rotary`; the last two dimensions of x are contiguous, and so are cos and sin."""
    rows, heads, dim = x.shape
    out = torch.empty((rows, heads, dim), dtype=x.dtype, device=x.device)
    half = dim // 2
    _rotary[(rows, heads)](
        x, cos, sin, out, x.stride(0), HEADS=heads, HALF=half, BLOCK=triton.next_power_of_2(half)
    )
    return out
