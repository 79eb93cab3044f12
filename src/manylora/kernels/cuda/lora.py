"""Adapters of a whole batch, with two launches per linear layer: shrink to the rank, then expand and add.

Both read A [rank, in] and B [rank, out] in place from the pool. `places` has a TABLE_ROW for each slot, layer
and module. Its columns are the offset; the rank (0: no row, and its programs exit at once); whether a DoRA
magnitude follows; the encoding of the numbers, which are widened when read; the bits of the row's scale with
`next` (for mixed adapters, the slot of the row that is added after this one, plus 1); and, for a row with
shared matrices, the location of its vectors. For routed experts the pieces are stored one after the other,
and a tile says which one it uses. Grids depend only on shapes. Everything is accumulated in float32. Among
tiles of one size a row is summed in a fixed order, whatever ranks and modules are in the batch, because
blocks are chosen by the layer only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import triton
from torch import Tensor

from manylora.kernels.cuda.blocks import BlockChooser, Blocks
from manylora.kernels.cuda.interpreter import widens
from manylora.kernels.cuda.launch import followed, launch
from manylora.kernels.cuda.lora_kernels import _expand, _shrink_rows, _shrink_tiles
from manylora.kernels.cuda.plan import MODULES, PLACE, TILE
from manylora.kernels.row_format import Encoding

# Inputs that a program processes at a time, and outputs per program. The first entry is the default without
# measurements. Depends on the rows per tile, because some would spill: see `make gpu-static`.
SHRINK_ROWS = (Blocks(256), Blocks(512), Blocks(512, warps=8), Blocks(128, warps=2))
SHRINK_TILES = (Blocks(64), Blocks(64, stages=4), Blocks(128))
EXPAND_ROWS = (Blocks(128), Blocks(256), Blocks(64, warps=2))
EXPAND_TILES = {
    16: (Blocks(64), Blocks(128), Blocks(128, warps=8)),
    64: (Blocks(64, warps=8, stages=4), Blocks(32, warps=8)),
}
# For float32, which takes three products.
SHRINK_FLOAT32 = (Blocks(64), Blocks(64, stages=4))
EXPAND_FLOAT32 = {16: (Blocks(64, warps=8), Blocks(32)), 64: (Blocks(32, warps=8, stages=2),)}
SPILLING_WEIGHED = (Blocks(128), Blocks(32))  # for tiles whose rows have weights for what they add


@dataclass(frozen=True)
class LoraTables:
    """The tables for both launches. Filled by `ops`.

    pool [elements]. places [slots, layers, MODULES, PLACE] int64. tiles [n, TILE] int32: as in `plan`.
    targets [targets, 3] int32: module, first column, columns. align: every offset, row length and column
    start is a multiple of this many elements; a power of two. encodings: of the batch's rows, except PLAIN.
    mixed, weighed: as in `plan.LoraPlan`. chooser: of block sizes.
    """

    pool: Tensor
    places: Tensor
    tiles: Tensor
    targets: Tensor
    layer: int
    tile_size: int
    rank: int
    align: int
    encodings: frozenset[Encoding] = frozenset()
    mixed: bool = False
    weighed: bool = False
    chooser: BlockChooser = field(default_factory=BlockChooser)

    @property
    def block_rank(self) -> int:
        """Ranks per block. For single rows always the same, because it determines the order of a sum."""
        return 16 if self.tile_size == 1 or self.rank <= 16 else 32

    @property
    def float8(self) -> bool:
        """Whether the batch has rows of 8-bit floats. Otherwise kernels are compiled without them."""
        return Encoding.FLOAT8 in self.encodings

    @property
    def scaled(self) -> bool:
        """Whether rows have scales. Otherwise kernels are compiled without them."""
        return self.float8 or self.mixed

    @property
    def codes(self) -> Tensor:
        """The pool as bytes, if kernels read bytes."""
        return self.pool.view(torch.uint8) if self.float8 else self.pool


def shrink(x: Tensor, tables: LoraTables, early: bool = False) -> Tensor:
    """Semantics, for each tile's rows and each target:
        partial.sum(0)[rows, target, :rank] = scale * d * x[rows] @ A.T       (d of shared rows alone)

    x [T, in], last dimension contiguous -> partial [splits, T, targets, rank class] float32. Entries beyond
    an adapter's rank are 0 up to the end of a block of ranks. Further entries, and those of rows without an
    adapter, are not written. early: see `launch.followed`.
    """
    num_rows, in_dim = x.shape
    num_targets = tables.targets.shape[0]
    splits = _splits(in_dim, tables.tile_size)
    partial = torch.empty(splits, num_rows, num_targets, tables.rank, dtype=torch.float32, device=x.device)
    block_r = tables.block_rank
    grid = (tables.tiles.shape[0], num_targets * triton.cdiv(tables.rank, block_r), splits)
    arguments = (
        x, tables.pool, tables.codes, tables.places, tables.tiles, tables.targets, partial, tables.layer,
        tables.places.shape[1], x.stride(0), num_rows, in_dim, num_targets, tables.rank // 16, splits,
    )  # fmt: skip
    constants = {
        "BLOCK_R": block_r, "ALIGN": tables.align, "MODULES": MODULES, "PLACE": PLACE, "TILE": TILE,
        "FLOAT8": tables.float8, "SCALED": tables.scaled, "MIXED": tables.mixed,
        "WEIGHED": tables.weighed, **followed(early),
    }  # fmt: skip

    def run(blocks: Blocks) -> None:
        options = {"BLOCK_K": blocks.size, "num_warps": blocks.warps, "num_stages": blocks.stages}
        if tables.tile_size == 1:
            launch(_shrink_rows, grid, *arguments, **constants, **options)
        else:
            tiled = {"BLOCK_M": tables.tile_size, "WIDEN": widens(x.dtype)}
            launch(_shrink_tiles, grid, *arguments, **constants, **options, **tiled)

    candidates: tuple[Blocks, ...] = SHRINK_ROWS
    if tables.tile_size > 1:
        candidates = SHRINK_FLOAT32 if x.dtype == torch.float32 else SHRINK_TILES
    shape = f"shrink {x.dtype} tile {tables.tile_size} in {in_dim}"
    run(tables.chooser.choose(shape, candidates, run))
    return partial


def expand_add(
    y: Tensor, partial: Tensor, in_dim: int, tables: LoraTables, bias: Tensor | None, early: bool = False
) -> None:
    """Semantics, for each tile's rows and each target with columns c, in order:
        y[rows, c] += partial.sum(0)[rows, target, :rank] @ B
        y[rows, c] = m * (y[rows, c] - bias[c]) + bias[c]        (only with a DoRA magnitude m)
    and for shared rows and mixed DoRA as `ReferenceOps.lora_add`.
    y [T, N], last dimension contiguous, is changed in place and rounded once, at the end. bias [N] or None.
    """
    num_rows, num_columns = y.shape

    def run(blocks: Blocks) -> None:
        grid = tables.tiles.shape[0], triton.cdiv(num_columns, blocks.size)
        launch(
            _expand, grid, y, partial, tables.pool, tables.codes, tables.places, tables.tiles, tables.targets,
            y if bias is None else bias, tables.layer, tables.places.shape[1], y.stride(0), num_rows, in_dim,
            num_columns, tables.targets.shape[0], tables.rank // 16, SPLITS=partial.shape[0],
            BLOCK_R=tables.block_rank, BLOCK_N=blocks.size, ALIGN=tables.align, MODULES=MODULES, PLACE=PLACE,
            TILE=TILE, FLOAT8=tables.float8, MIXED=tables.mixed, WEIGHED=tables.weighed,
            BLOCK_M=tables.tile_size, BIASED=bias is not None, WIDEN=widens(y.dtype), num_warps=blocks.warps,
            num_stages=blocks.stages, **followed(early),
        )  # fmt: skip

    candidates: tuple[Blocks, ...] = EXPAND_ROWS
    if tables.tile_size > 1:
        candidates = (EXPAND_FLOAT32 if y.dtype == torch.float32 else EXPAND_TILES)[tables.tile_size]
    shape = f"expand {y.dtype} tile {tables.tile_size} out {num_columns}"
    if tables.weighed:
        shape += " weighed"
        if tables.tile_size > 1:
            candidates = tuple(one for one in candidates if one not in SPILLING_WEIGHED)
    run(tables.chooser.choose(shape, candidates, run))


def _splits(in_dim: int, tile_size: int) -> int:
    """Parts of the input processed by separate shrink programs. Depends only on the shape, so that rows do
    not depend on the rest of the batch. Few rows need many programs to use the memory bandwidth.
    """
    most = 16 if tile_size < 64 else 4
    return max(1, min(most, 1 << int(math.log2(max(1, in_dim // 512)))))
