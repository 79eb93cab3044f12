"""Numbers in the kernels: matrix products, 8-bit floats (e4m3), and workarounds for the limits of triton's
interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq

from manylora.kernels.cuda.launch import launch
from manylora.kernels.spec import FP8


def is_interpreted() -> bool:
    return bool(triton.knobs.runtime.interpret)


def widens(dtype: torch.dtype) -> bool:
    """Whether a matrix product must widen its operands, because the interpreter treats bfloat16 as
    integers.
    """
    return dtype == torch.bfloat16 and is_interpreted()


@triton.jit
def _dot(a, b, total, WIDEN: tl.constexpr):
    if WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    else:  # noqa: RET505 - a compile-time branch: both arms must return
        # float32 by three products of TF32 each: as exact, but by tensor cores, with registers to spare
        return tl.dot(a, b, total, input_precision="tf32x3")


@triton.jit
def _from_e4m3(code):
    """uint8 -> float32, exact. NaN (0x7f) is never stored here."""
    if cuda_capability_geq(8, 9):
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:  # noqa: RET505 - a compile-time branch: older GPUs and the interpreter
        wide = code.to(tl.uint32)
        # The bits become fields of a float32, whose exponent bias is larger by 120; right for subnormals too.
        bits = ((wide & 0x80) << 24) | ((wide & 0x7F) << 20)
        return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120


@triton.jit
def _to_e4m3(value):
    """float32 -> uint8, rounded to the nearest, ties to even; beyond 448 the largest. NaN becomes NaN."""
    broken = value != value
    size = tl.minimum(tl.abs(value), 448.0)
    bits = size.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    normal = rounded - (120 << 3)
    # Below 2 ** -6 codes count steps of 2 ** -9; adding 2 ** 23 leaves the nearest whole number in the bits.
    small = (size * 512.0 + 8388608.0).to(tl.uint32, bitcast=True) - 0x4B000000
    code = tl.where(size < 0.015625, small, normal)
    code = tl.where(broken, 0x7F, code)
    sign = (value.to(tl.uint32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8)


@triton.jit
def _dot_e4m3(a, b, total, EXACT: tl.constexpr):
    """A product of e4m3 codes (uint8) by FP8 tensor cores; EXACT: by widening them, for the interpreter."""
    if EXACT:
        return tl.dot(_from_e4m3(a), _from_e4m3(b), total, input_precision="ieee")
    else:  # noqa: RET505 - a compile-time branch: both arms must return
        left, right = a.to(tl.float8e4nv, bitcast=True), b.to(tl.float8e4nv, bitcast=True)
        # Hopper's FP8 accumulators have few bits: they are added to float32 every 128 products.
        return tl.dot(left, right, total, max_num_imprecise_acc=128)


@triton.jit
def _quantise(x, codes, scales, x_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    values = tl.load(x + row * x_stride + column, mask=inside, other=0).to(tl.float32)
    largest = tl.max(tl.abs(values), axis=0)
    scale = tl.where(largest > 0, largest / 448.0, 1.0)
    tl.store(codes + row * WIDTH + column, _to_e4m3(values / scale), mask=inside)
    tl.store(scales + row, scale)


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Semantics: scales = x.abs().amax(1, keepdim=True) / 448; values = x / scales, rounded to e4m3.

    x [T, K], last dimension contiguous -> values float8_e4m3fn [T, K], scales float32 [T, 1].
    """
    rows, width = x.shape
    codes = torch.empty((rows, width), dtype=torch.uint8, device=x.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    if rows:
        block = triton.next_power_of_2(width)
        warps = 4 if block <= 2048 else 8 if block <= 8192 else 16  # so that a row fits into registers
        sizes = {"WIDTH": width, "BLOCK": block, "num_warps": warps}
        launch(_quantise, (rows,), x, codes, scales, x.stride(0), **sizes)
    return codes.view(FP8), scales


def has_fp8_units(device: torch.device) -> bool:
    """Whether the device has FP8 tensor cores: GPUs from Ada and Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def as_bytes(x: Tensor) -> Tensor:
    """A tensor of 8-bit floats viewed as uint8, as kernels expect. Other tensors are returned unchanged."""
    return x.view(torch.uint8) if x.dtype == FP8 else x
