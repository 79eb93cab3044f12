"""Linear layers of several weights in one launch, each tile of rows with its own: plain or quantised.

Weights lie where they are; a table of addresses says where. A quantised one is widened in registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from manylora.kernels.cuda.fp8 import FP8, _from_e4m3
from manylora.kernels.cuda.interpreter import _dot, widens
from manylora.kernels.cuda.plan import TILE
from manylora.kernels.quantised import QuantisedWeight
from manylora.kernels.spec import Weight

__all__ = ["WeightTable", "grouped_linear", "quantised_rows", "weight_table"]

PLAIN, INT8, E4M3, INT4 = range(4)
POINTERS = 3  # addresses of one weight: values, scales, offsets
KINDS = {torch.int8: INT8, FP8: E4M3, torch.uint8: INT4}


@dataclass(frozen=True)
class WeightTable:
    """pointers [E, POINTERS] int64: addresses of values, scales and offsets of weights [N, K] of one kind.

    groups: scales of one output.
    """

    pointers: Tensor
    kind: int
    shape: tuple[int, int]
    groups: int
    has_offsets: bool


@triton.jit
def _weights(
    values, scales, offsets, k, n, num_in, num_out, KIND: tl.constexpr, GROUP: tl.constexpr,
    OFFSETS: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """[k, n] of a weight, in TYPE; a scale of a whole output is left to the caller."""
    inside = (k < num_in)[:, None] & (n < num_out)[None, :]
    rows = n.to(tl.int64)[None, :]
    at = rows * num_in + k[:, None]
    if KIND == 0:
        found = tl.load(values.to(tl.pointer_type(TYPE)) + at, mask=inside, other=0)
    else:
        if KIND == 1:
            wide = tl.load(values.to(tl.pointer_type(tl.int8)) + at, mask=inside, other=0).to(tl.float32)
        elif KIND == 2:
            wide = _from_e4m3(tl.load(values.to(tl.pointer_type(tl.uint8)) + at, mask=inside, other=0))
        else:
            at = rows * (num_in // 2) + (k // 2)[:, None]
            both = tl.load(values.to(tl.pointer_type(tl.uint8)) + at, mask=inside, other=0).to(tl.int32)
            wide = (((both >> ((k % 2) * 4)[:, None]) & 15) - 8).to(tl.float32)
        if GROUP > 0:
            at = rows * (num_in // GROUP) + (k // GROUP)[:, None]
            wide *= tl.load(scales.to(tl.pointer_type(TYPE)) + at, mask=inside, other=0).to(tl.float32)
            if OFFSETS:
                wide += tl.load(offsets.to(tl.pointer_type(TYPE)) + at, mask=inside, other=0).to(tl.float32)
        found = wide.to(TYPE)
    return found


@triton.jit
def _grouped(
    y, x, bias, tiles, table, x_stride, num_rows, num_in, num_out,
    KIND: tl.constexpr, GROUP: tl.constexpr, OFFSETS: tl.constexpr, TILED: tl.constexpr,
    BIASED: tl.constexpr, TILE: tl.constexpr, POINTERS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    first, number = tile.to(tl.int64) * BLOCK_M, 0
    count = tl.minimum(num_rows - first, BLOCK_M).to(tl.int32)
    if TILED:
        count = tl.load(tiles + tile * TILE + 1)
        first, number = tl.load(tiles + tile * TILE).to(tl.int64), tl.load(tiles + tile * TILE + 3)
    if count == 0:
        return
    here = table + number * POINTERS
    values = tl.multiple_of(tl.load(here), 16)
    scales, offsets = tl.load(here + 1), tl.load(here + 2)
    m, n = tl.arange(0, BLOCK_M), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = first + m
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, num_in, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        mine = (m < count)[:, None] & (k < num_in)[None, :]
        xs = tl.load(x + rows[:, None] * x_stride + k[None, :], mask=mine, other=0)
        weights = _weights(
            values, scales, offsets, k, n, num_in, num_out, KIND, GROUP, OFFSETS, x.dtype.element_ty
        )
        total = _dot(xs, weights, total, WIDEN)
    if KIND != 0 and GROUP == 0:
        kept = scales.to(tl.pointer_type(x.dtype.element_ty))
        total *= tl.load(kept + n, mask=n < num_out, other=0).to(tl.float32)[None, :]
    if BIASED:
        total += tl.load(bias + n, mask=n < num_out, other=0).to(tl.float32)[None, :]
    to = y + rows[:, None] * num_out + n[None, :]
    tl.store(to, total.to(y.dtype.element_ty), mask=(m < count)[:, None] & (n < num_out)[None, :])


def weight_table(weights: Sequence[Weight]) -> WeightTable:
    """weights: of one shape and kind, on one device, contiguous; the caller keeps them where they are."""
    plain = [w for w in weights if isinstance(w, Tensor)]
    quantised = [w for w in weights if isinstance(w, QuantisedWeight)]
    if plain:
        addresses, some = [(w.data_ptr(), 0, 0) for w in plain], plain[0]
        kind, groups, has_offsets = PLAIN, 0, False
        shape = some.shape[0], some.shape[1]
    else:
        one = quantised[0]
        addresses = [
            (w.values.data_ptr(), w.scales.data_ptr(), 0 if w.offsets is None else w.offsets.data_ptr())
            for w in quantised
        ]
        some, kind, shape = one.values, KINDS[one.values.dtype], one.shape
        groups, has_offsets = one.scales.shape[1], one.offsets is not None
    assert len(addresses) == len(weights), "weights of a table are of one kind, and not packed"
    pointers = torch.tensor(addresses, dtype=torch.int64, device=some.device)
    return WeightTable(pointers, kind, shape, groups, has_offsets)


def grouped_linear(x: Tensor, tiles: Tensor, tile_size: int, table: WeightTable) -> Tensor:
    """Semantics, for each tile (first, count, _, e): y[first:first+count] = x[first:first+count] @ W[e].T

    x [P, K] in the dtype of plain weights or of scales, last dimension contiguous -> [P, N]. tiles [n, TILE]
    int32, covering all of x, none with more than tile_size rows.
    """
    return _launch(x, tiles, tile_size, tiles.shape[0], table, None)


def quantised_rows(x: Tensor, table: WeightTable, bias: Tensor | None) -> Tensor:
    """Semantics: x @ W.T + bias, of a table of one weight; x [T, K] -> [T, N]."""
    size = 16 if x.shape[0] <= 16 else 64
    return _launch(x, None, size, triton.cdiv(x.shape[0], size), table, bias)


def _launch(
    x: Tensor, tiles: Tensor | None, tile_size: int, count: int, table: WeightTable, bias: Tensor | None
) -> Tensor:
    num_out, num_in = table.shape
    y = torch.empty((x.shape[0], num_out), dtype=x.dtype, device=x.device)
    block_n = 64 if tile_size == 16 else 128
    block_k = 128 // x.element_size()  # so that the stages of any dtype fit into shared memory
    per_output = table.groups == 1 and not table.has_offsets
    if count:
        _grouped[(count, triton.cdiv(num_out, block_n))](
            y, x, y if bias is None else bias, y if tiles is None else tiles, table.pointers, x.stride(0),
            x.shape[0], num_in, num_out,
            KIND=table.kind, GROUP=0 if per_output or not table.groups else num_in // table.groups,
            OFFSETS=table.has_offsets, TILED=tiles is not None, BIASED=bias is not None, TILE=TILE,
            POINTERS=POINTERS, BLOCK_M=tile_size, BLOCK_N=block_n, BLOCK_K=block_k, WIDEN=widens(x.dtype),
        )  # fmt: skip
    return y
