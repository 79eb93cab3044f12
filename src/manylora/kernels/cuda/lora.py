"""Adapters of a whole batch, with two launches per linear layer: shrink to the rank, then expand and add.

Both read A [rank, in] and B [rank, out] in place from the pool. `places` has a TABLE_ROW for each slot, layer
and module. Its columns are the offset; the rank (0: no row, and its programs exit at once); whether a DoRA
magnitude follows; the encoding of the numbers, which are widened when read; the bits of the row's scale with
`next` (for mixed adapters, the slot of the row that is added after this one, plus 1); and, for a row with
shared matrices, the location of its vectors. For routed experts the pieces are stored one after the other,
and a tile says which one it uses. Grids depend only on shapes. Everything is accumulated in float32. Among
tiles of one size a row is summed in a fixed order, whatever ranks and modules are in the batch, because
block sizes depend on the layer only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from manylora.kernels.cuda.arithmetic import _dot, _from_e4m3, widens
from manylora.kernels.cuda.launch import SHRINK, expand_blocks, launch
from manylora.kernels.cuda.plan import MODULES, PLACE, TILE, RowKinds
from manylora.kernels.row_format import Encoding

# Integers that differ between batches of one model. Triton would compile a variant for each kind of value.
CHANGING = ["layer", "num_rows", "num_targets", "rank_blocks", "num_splits"]


@triton.jit
def _place(places, targets, target, slot, layer, layers, MODULES: tl.constexpr, PLACE: tl.constexpr):
    module = tl.load(targets + target * 3)
    return places + ((slot.to(tl.int64) * layers + layer) * MODULES + module) * PLACE


@triton.jit
def _begin(place, piece, rank, in_dim, width, ALIGN: tl.constexpr):
    """Where in the pool A of a tile's piece begins."""
    size = rank * (in_dim + width) + tl.where(tl.load(place + 2) != 0, width, 0)
    return tl.multiple_of(tl.load(place) + piece.to(tl.int64) * size, ALIGN)


@triton.jit
def _is_narrow(place, FLOAT8: tl.constexpr):
    """Whether the row at a place is of 8-bit floats."""
    if FLOAT8:
        return tl.load(place + 3) == 1
    else:  # noqa: RET505 - a compile-time branch: both arms must return
        return False


@triton.jit
def _read(pool, codes, begin, index, inside, narrow, FLOAT8: tl.constexpr):
    """Numbers of a row, in the pool's type. codes: the pool as bytes."""
    if FLOAT8:  # each row is in one type: the other's loads are masked off, and read nothing
        wide = tl.load(pool + begin + index, mask=inside & (narrow == 0), other=0)
        code = tl.load(codes + begin + index, mask=inside & narrow, other=0)
        return tl.where(narrow, _from_e4m3(code).to(wide.dtype), wide)
    else:  # noqa: RET505
        return tl.load(pool + begin + index, mask=inside, other=0)


@triton.jit
def _link(place):
    """The slot of the row that is added after this one, and 1; 0: there is none."""
    return tl.load(place + 4) >> 32


@triton.jit
def _member(
    place, block, places, targets, target, layer, layers, BLOCK_R: tl.constexpr, MODULES: tl.constexpr,
    PLACE: tl.constexpr, MIXED: tl.constexpr,
):  # fmt: skip
    """The place of the row that a block of ranks is of, and which of its blocks that is. Rows that are mixed
    begin with a block of their own."""
    if MIXED:
        blocks = tl.cdiv(tl.load(place + 1).to(tl.int32), BLOCK_R)
        link = _link(place)
        while (link != 0) & (block >= blocks):
            block -= blocks
            place = _place(places, targets, target, link - 1, layer, layers, MODULES, PLACE)
            blocks = tl.cdiv(tl.load(place + 1).to(tl.int32), BLOCK_R)
            link = _link(place)
    return place, block


@triton.jit
def _scale(place, SCALED: tl.constexpr):
    if SCALED:
        return tl.load(place + 4).to(tl.int32).to(tl.float32, bitcast=True)
    else:  # noqa: RET505
        return 1.0


@triton.jit
def _rank_weights(pool, place, r, rank, width):
    """What coefficients r of a row are multiplied by: 1 of those without vectors."""
    vectors = tl.load(place + 5)
    mine = (vectors >= 0) & (r < rank)
    weights = tl.load(pool + vectors + width + r, mask=mine, other=0).to(tl.float32)
    return tl.where(mine, weights, 1.0)


@triton.jit
def _column_weights(pool, place, end, column, inside):
    """What a row adds is multiplied by, and whether it has such weights. end: of its matrices."""
    vectors, mixed = tl.load(place + 5), tl.load(place + 2) == 2
    shared = vectors >= 0
    weights = pool + tl.where(shared, vectors, end)
    return tl.load(weights + column, mask=inside & (shared | mixed), other=0).to(tl.float32), shared | mixed


@triton.jit
def _add_change(change, pool, place, piece, in_dim, width, column, inside, ALIGN: tl.constexpr):
    """change, and what a mixed row with DoRA adds to it: scale * (magnitude - 1)."""
    rank = tl.load(place + 1).to(tl.int32)
    mixed = tl.load(place + 2) == 2
    end = _begin(place, piece, rank, in_dim, width, ALIGN) + rank * (in_dim + width)
    magnitude = tl.load(pool + end + column, mask=inside & mixed, other=0).to(tl.float32)
    return change + tl.where(mixed, (magnitude - 1) * _scale(place, True), 0.0), mixed


@triton.jit
def _partial(split, rows, target, num_rows, num_targets, rank_blocks):
    """Where the sums of rows for a target begin. rank_blocks: of 16 ranks, so that this is aligned."""
    return ((split * num_rows + rows) * num_targets + target) * (rank_blocks * 16)


@triton.jit(do_not_specialize=CHANGING)
def _shrink(
    x, pool, codes, places, tiles, targets, partial, layer, layers, x_stride, num_rows, in_dim,
    num_targets, rank_blocks, num_splits, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, ALIGN: tl.constexpr,
    MODULES: tl.constexpr, PLACE: tl.constexpr, TILE: tl.constexpr, FLOAT8: tl.constexpr,
    SCALED: tl.constexpr, MIXED: tl.constexpr, WEIGHED: tl.constexpr, BLOCK_M: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """A single row is multiplied as a vector, several with tensor cores."""
    tile, split = tl.program_id(0), tl.program_id(2)
    target, block = tl.program_id(1) % num_targets, tl.program_id(1) // num_targets
    count = tl.load(tiles + tile * TILE + 1)
    if count == 0:
        return
    first, slot = tl.load(tiles + tile * TILE).to(tl.int64), tl.load(tiles + tile * TILE + 2)
    head = _place(places, targets, target, slot, layer, layers, MODULES, PLACE)
    place, own = _member(
        head, block, places, targets, target, layer, layers, BLOCK_R, MODULES, PLACE, MIXED
    )  # fmt: skip
    rank = tl.load(place + 1).to(tl.int32)
    if own * BLOCK_R >= rank:
        return
    sizes = in_dim + tl.load(targets + target * 3 + 2)
    a = _begin(place, tl.load(tiles + tile * TILE + 3), rank, in_dim, sizes - in_dim, ALIGN)
    narrow = _is_narrow(place, FLOAT8)
    m, r = tl.arange(0, BLOCK_M), own * BLOCK_R + tl.arange(0, BLOCK_R)
    rows = first + m
    total = tl.zeros([BLOCK_R], tl.float32) if BLOCK_M == 1 else tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    span = tl.cdiv(tl.cdiv(in_dim, num_splits), BLOCK_K) * BLOCK_K
    for start in range(split * span, tl.minimum(in_dim, (split + 1) * span), BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        if BLOCK_M == 1:
            xs = tl.load(x + first * x_stride + k, mask=k < in_dim, other=0).to(tl.float32)
            inside = (r < rank)[:, None] & (k < in_dim)[None, :]
            weights = _read(pool, codes, a, r[:, None] * in_dim + k[None, :], inside, narrow, FLOAT8)
            total += tl.sum(weights.to(tl.float32) * xs[None, :], axis=1)
        else:
            here = (m < count)[:, None] & (k < in_dim)[None, :]
            xs = tl.load(x + rows[:, None] * x_stride + k[None, :], mask=here, other=0)
            inside = (k < in_dim)[:, None] & (r < rank)[None, :]
            weights = _read(pool, codes, a, r[None, :] * in_dim + k[:, None], inside, narrow, FLOAT8)
            total = _dot(xs, weights, total, WIDEN)
    total *= _scale(place, SCALED)
    if WEIGHED:
        weights_of = _rank_weights(pool, place, r, rank, sizes - in_dim)
        total *= weights_of if BLOCK_M == 1 else weights_of[None, :]
    to = partial + _partial(split, rows, target, num_rows, num_targets, rank_blocks)[:, None]
    at = block * BLOCK_R + tl.arange(0, BLOCK_R)  # zeros from the rank to the end of the block
    tl.store(to + at[None, :], tl.reshape(total, [BLOCK_M, BLOCK_R]), mask=(m < count)[:, None])


@triton.jit
def _add_one(
    value, partial, pool, codes, place, piece, base, rows, here, target, column, inside, in_dim, width,
    num_rows, num_targets, rank_blocks, SPLITS: tl.constexpr, BLOCK_R: tl.constexpr, ALIGN: tl.constexpr,
    FLOAT8: tl.constexpr, WEIGHED: tl.constexpr, BLOCK_M: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """value and what the row at a place adds to it. base: rank of `partial` where its own begin."""
    rank = tl.load(place + 1).to(tl.int32)
    narrow = _is_narrow(place, FLOAT8)
    b = _begin(place, piece, rank, in_dim, width, ALIGN) + tl.multiple_of(rank * in_dim, ALIGN)
    before = value
    if WEIGHED:  # other rows are summed as in batches without these
        weights_of, weighs = _column_weights(pool, place, b + rank * width, column, inside)
        value = tl.where(weighs, 0.0, value)
    for bottom in range(0, rank, BLOCK_R):
        r = bottom + tl.arange(0, BLOCK_R)
        low_rank = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        for split in tl.static_range(SPLITS):
            at = _partial(split, rows, target, num_rows, num_targets, rank_blocks)[:, None]
            low_rank += tl.load(partial + at + (base + r)[None, :], mask=here[:, None], other=0)
        both = (r < rank)[:, None] & inside[None, :]
        index = r[:, None] * width + column[None, :]
        weights = _read(pool, codes, b, index, both, narrow, FLOAT8)
        if BLOCK_M == 1:
            product = tl.reshape(low_rank, [BLOCK_R, 1]) * weights.to(tl.float32)
            value += tl.sum(product, axis=0)[None, :]
        else:
            value = _dot(low_rank.to(weights.dtype), weights, value, WIDEN)
    if WEIGHED:
        value = tl.where(weighs, before + value * weights_of[None, :], value)
    return value


@triton.jit(do_not_specialize=CHANGING[:-1])
def _expand(
    y, partial, pool, codes, places, tiles, targets, bias, layer, layers, y_stride, num_rows, in_dim,
    num_columns, num_targets, rank_blocks, SPLITS: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr, ALIGN: tl.constexpr, MODULES: tl.constexpr, PLACE: tl.constexpr,
    TILE: tl.constexpr, FLOAT8: tl.constexpr, MIXED: tl.constexpr, WEIGHED: tl.constexpr,
    BLOCK_M: tl.constexpr, BIASED: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    tile, low = tl.program_id(0), tl.program_id(1) * BLOCK_N
    count = tl.load(tiles + tile * TILE + 1)
    if count == 0:
        return
    first, slot = tl.load(tiles + tile * TILE).to(tl.int64), tl.load(tiles + tile * TILE + 2)
    piece = tl.load(tiles + tile * TILE + 3)
    ranks = 0
    for target in range(num_targets):
        start, width = tl.load(targets + target * 3 + 1), tl.load(targets + target * 3 + 2)
        if (start < low + BLOCK_N) & (start + width > low):
            place = _place(places, targets, target, slot, layer, layers, MODULES, PLACE)
            ranks += tl.load(place + 1).to(tl.int32)
    if ranks == 0:
        return
    m, n = tl.arange(0, BLOCK_M), low + tl.arange(0, BLOCK_N)
    rows = first + m
    mine = (m < count)[:, None] & (n < num_columns)[None, :]
    out = y + rows[:, None] * y_stride + n[None, :]
    value = tl.load(out, mask=mine, other=0).to(tl.float32)
    shift = tl.zeros([BLOCK_N], tl.float32)
    if BIASED:
        shift = tl.load(bias + n, mask=n < num_columns, other=0).to(tl.float32)
    # Targets may overlap (a fused module and its part), so one program does all of its columns' in order.
    for target in range(num_targets):
        start = tl.multiple_of(tl.load(targets + target * 3 + 1), ALIGN)
        width = tl.multiple_of(tl.load(targets + target * 3 + 2), ALIGN)
        if (start < low + BLOCK_N) & (start + width > low):
            place = _place(places, targets, target, slot, layer, layers, MODULES, PLACE)
            rank = tl.load(place + 1).to(tl.int32)
            if rank > 0:
                column = n - start
                inside = (column >= 0) & (column < width)
                if WEIGHED:  # what the base gave, before any row adds to it
                    change, mixed = _add_change(
                        tl.zeros([BLOCK_N], tl.float32), pool, place, piece, in_dim, width, column, inside,
                        ALIGN,
                    )  # fmt: skip
                    if MIXED:
                        link = _link(place)
                        while link != 0:
                            other = _place(places, targets, target, link - 1, layer, layers, MODULES, PLACE)
                            change, also = _add_change(
                                change, pool, other, piece, in_dim, width, column, inside, ALIGN
                            )
                            mixed = mixed | also
                            link = _link(other)
                    changed = (1 + change)[None, :] * (value - shift[None, :]) + shift[None, :]
                    value = tl.where(inside[None, :] & mixed, changed, value)
                value = _add_one(
                    value, partial, pool, codes, place, piece, 0, rows, m < count, target, column, inside,
                    in_dim, width, num_rows, num_targets, rank_blocks, SPLITS, BLOCK_R, ALIGN, FLOAT8,
                    WEIGHED, BLOCK_M, WIDEN,
                )  # fmt: skip
                if MIXED:
                    base, link = tl.cdiv(rank, BLOCK_R) * BLOCK_R, _link(place)
                    while link != 0:
                        other = _place(places, targets, target, link - 1, layer, layers, MODULES, PLACE)
                        value = _add_one(
                            value, partial, pool, codes, other, piece, base, rows, m < count, target, column,
                            inside, in_dim, width, num_rows, num_targets, rank_blocks, SPLITS, BLOCK_R,
                            ALIGN, FLOAT8, WEIGHED, BLOCK_M, WIDEN,
                        )  # fmt: skip
                        base += tl.cdiv(tl.load(other + 1).to(tl.int32), BLOCK_R) * BLOCK_R
                        link = _link(other)
                if tl.load(place + 2) == 1:
                    a = _begin(place, piece, rank, in_dim, width, ALIGN)
                    at = pool + a + tl.multiple_of(rank * in_dim, ALIGN) + rank * width + column
                    magnitude = tl.load(at, mask=inside, other=1).to(tl.float32)
                    scaled = magnitude[None, :] * (value - shift[None, :]) + shift[None, :]
                    value = tl.where(inside[None, :], scaled, value)
    tl.store(out, value.to(y.dtype.element_ty), mask=mine)


@dataclass(frozen=True)
class LoraTables:
    """The tables for both launches. Filled by `ops`.

    pool [elements]. places [slots, layers, MODULES, PLACE] int64. tiles [n, TILE] int32: as in `plan`.
    targets [targets, 3] int32: module, first column, columns. align: every offset, row length and column
    start is a multiple of this many elements; a power of two. kinds: of the batch's rows.
    """

    pool: Tensor
    places: Tensor
    tiles: Tensor
    targets: Tensor
    layer: int
    tile_size: int
    align: int
    kinds: RowKinds

    @property
    def block_rank(self) -> int:
        """Ranks per block. For single rows always the same, because it determines the order of a sum."""
        return 16 if self.tile_size == 1 or self.kinds.rank <= 16 else 32

    @property
    def float8(self) -> bool:
        """Whether the batch has rows of 8-bit floats."""
        return Encoding.FLOAT8 in self.kinds.encodings

    @property
    def constants(self) -> dict[str, int]:
        """Of both kernels, which are compiled without what the batch's rows do not need."""
        return {
            "BLOCK_R": self.block_rank, "ALIGN": self.align, "MODULES": MODULES, "PLACE": PLACE, "TILE": TILE,
            "FLOAT8": self.float8, "MIXED": self.kinds.mixed, "WEIGHED": self.kinds.weighed,
        }  # fmt: skip

    @property
    def codes(self) -> Tensor:
        """The pool as bytes, if kernels read bytes."""
        return self.pool.view(torch.uint8) if self.float8 else self.pool


def shrink(x: Tensor, tables: LoraTables) -> Tensor:
    """Semantics, for each tile's rows and each target:
        partial.sum(0)[rows, target, :rank] = scale * d * x[rows] @ A.T       (d of shared rows alone)

    x [T, in], last dimension contiguous -> partial [splits, T, targets, rank class] float32. Entries beyond
    an adapter's rank are 0 up to the end of a block of ranks. Further entries, and those of rows without an
    adapter, are not written.
    """
    num_rows, in_dim = x.shape
    num_targets, rank, tile_size = tables.targets.shape[0], tables.kinds.rank, tables.tile_size
    splits = _splits(in_dim, tile_size)
    partial = torch.empty(splits, num_rows, num_targets, rank, dtype=torch.float32, device=x.device)
    grid = tables.tiles.shape[0], num_targets * triton.cdiv(rank, tables.block_rank), splits
    arguments = (
        x, tables.pool, tables.codes, tables.places, tables.tiles, tables.targets, partial, tables.layer,
        tables.places.shape[1], x.stride(0), num_rows, in_dim, num_targets, rank // 16, splits,
    )  # fmt: skip
    blocks = SHRINK[tile_size]
    constants = {
        **tables.constants, "BLOCK_K": blocks.size, "SCALED": tables.float8 or tables.kinds.mixed,
        **blocks.options,
    }  # fmt: skip
    launch(_shrink, grid, *arguments, **constants, BLOCK_M=tile_size, WIDEN=widens(x.dtype))
    return partial


def expand_add(y: Tensor, partial: Tensor, in_dim: int, tables: LoraTables, bias: Tensor | None) -> None:
    """Semantics, for each tile's rows and each target with columns c, in order:
        y[rows, c] += partial.sum(0)[rows, target, :rank] @ B
        y[rows, c] = m * (y[rows, c] - bias[c]) + bias[c]        (only with a DoRA magnitude m)
    and for shared rows and mixed DoRA as `ReferenceOps.lora_add`.
    y [T, N], last dimension contiguous, is changed in place and rounded once, at the end. bias [N] or None.
    """
    num_rows, num_columns = y.shape
    blocks = expand_blocks(tables.tile_size, y.dtype)
    launch(
        _expand, (tables.tiles.shape[0], triton.cdiv(num_columns, blocks.size)), y, partial, tables.pool,
        tables.codes, tables.places, tables.tiles, tables.targets, y if bias is None else bias, tables.layer,
        tables.places.shape[1], y.stride(0), num_rows, in_dim, num_columns, tables.targets.shape[0],
        tables.kinds.rank // 16, **tables.constants, SPLITS=partial.shape[0], BLOCK_N=blocks.size,
        BLOCK_M=tables.tile_size, BIASED=bias is not None, WIDEN=widens(y.dtype), **blocks.options,
    )  # fmt: skip


def _splits(in_dim: int, tile_size: int) -> int:
    """Parts of the input processed by separate shrink programs. Depends only on the shape, so that rows do
    not depend on the rest of the batch. Few rows need many programs to use the memory bandwidth.
    """
    most = 16 if tile_size < 64 else 4
    return max(1, min(most, 1 << int(math.log2(max(1, in_dim // 512)))))
