"""Keys and values of a step into their pages, both in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from manylora.kernels.cuda.fp8 import FP8, _to_e4m3, as_bytes

__all__ = ["store_kv"]


@triton.jit
def _store(
    k, v, k_cache, v_cache, slots, k_stride, v_stride, WIDTH: tl.constexpr, NARROW: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    to = slot * WIDTH + column
    keys = tl.load(k + row * k_stride + column, mask=inside)
    values = tl.load(v + row * v_stride + column, mask=inside)
    if NARROW:
        keys, values = _to_e4m3(keys.to(tl.float32)), _to_e4m3(values.to(tl.float32))
    tl.store(k_cache + to, keys, mask=inside)
    tl.store(v_cache + to, values, mask=inside)


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Semantics: k_cache.view(-1, H, D)[slots] = k, the same for v; rows with slot -1 are left out.

    k, v [T, H, D], last two dimensions contiguous; caches [blocks, tokens_per_block, H, D], contiguous, of
    k's dtype or float8_e4m3fn; slots [T] int64.
    """
    rows, heads, dim = k.shape
    width = heads * dim
    block = min(1024, triton.next_power_of_2(width))
    grid = (rows, triton.cdiv(width, block))
    _store[grid](
        k, v, as_bytes(k_cache), as_bytes(v_cache), slots, k.stride(0), v.stride(0), WIDTH=width,
        NARROW=k_cache.dtype == FP8, BLOCK=block,
    )  # fmt: skip
