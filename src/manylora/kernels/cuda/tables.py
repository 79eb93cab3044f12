"""The batches of `kernels.spec` with the tables that the kernels in this folder read. Built on the host."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from manylora.kernels.cuda.plan import (
    TILE_SIZES,
    Places,
    RowKinds,
    SlotUpdate,
    module_class,
    slots_of_rows,
    tile_size_of,
    tiles_of,
)
from manylora.kernels.spec import AttentionBatch, BatchLimits, LoraBatch

BLOCK_ROWS = 64  # rows of a tile of a prompt: queries times the heads of a group
FLOAT32_BLOCK_ROWS = 32  # so that a tile fits in registers
WIDE = 256  # elements of a head; tiles of wider heads have half the rows
PART_KEYS = 128  # minimum keys per program when decoding; its partial sum is 1/16 of them


@dataclass(frozen=True)
class PlannedLora(LoraBatch):
    """places, tiles: as in `kernels.cuda.lora.LoraTables`. tile_size: the most rows in a tile.

    row_slots [rows] int32: the slot of each row, -1 without an adapter; empty for a model without experts.
    most_adapters: upper bound for batches of this shape.
    """

    places: Tensor = field(default_factory=lambda: torch.empty(0))
    tiles: Tensor = field(default_factory=lambda: torch.empty(0))
    tile_size: int = 1
    kinds: RowKinds = field(default_factory=RowKinds)
    row_slots: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))
    most_adapters: int = 1

    def among(self, rows: Sequence[int]) -> None:
        """None: the tiles only work for all rows."""

    @property
    def shape(self) -> Hashable:
        """Everything that determines which kernels are launched, with which grids and on which memory. The
        rest is contents of tables.
        """
        addresses = self.places.data_ptr(), self.pool.data_ptr()
        return self.tile_size, self.tiles.shape[0], self.kinds, *addresses


class Tiling(NamedTuple):
    """Tiles [start, stop) of a batch, with block_rows rows each: queries times the heads of a group."""

    start: int
    stop: int
    block_rows: int


@dataclass(frozen=True)
class PagedBatch(AttentionBatch):
    """starts [S + 1], lengths [S] int32: query_starts and kv_lens. Tiles [n, 2] int32: sequence, first query.

    single_tiles: of sequences with one query, whose keys are split; tiles: of the others, one tiling after
    another. tilings: which of these are for layers with a given number and size of key heads. part_keys: the
    keys of a part are a multiple of it. max_queries, max_keys: bounds for the batch, or for every fixed
    batch: the width of its block table.
    """

    starts: Tensor = field(default_factory=lambda: torch.empty(0))
    lengths: Tensor = field(default_factory=lambda: torch.empty(0))
    single_tiles: Tensor = field(default_factory=lambda: torch.empty(0))
    tiles: Tensor = field(default_factory=lambda: torch.empty(0))
    part_keys: int = PART_KEYS
    tilings: Mapping[tuple[int, int], Tiling] = field(default_factory=dict)
    max_queries: int = 1
    max_keys: int = 1


def plan_lora(
    batch: LoraBatch, places: Places, num_rows: int, fixed: bool, routed: bool
) -> tuple[PlannedLora, tuple[SlotUpdate, ...]]:
    """The tables of a batch with `num_rows` rows, on the host, without `places`; and what these lack.

    fixed: one row per sequence; pad to one of two numbers of tiles. routed: whether the model has experts,
    whose kernels are the only ones to read `row_slots`.
    """
    entries, updates = places.take([segment.rows for segment in batch.segments])
    starts = np.array([segment.start for segment in batch.segments], np.int32)
    stops = np.array([segment.stop for segment in batch.segments], np.int32)
    slots = np.array([entry.slot for entry in entries], np.int32)
    size = tile_size_of(int((stops - starts).sum()) / len(starts))
    kinds = RowKinds.of_batch([entry.kinds for entry in entries])
    if fixed:
        size = min(size, TILE_SIZES[1])
        kinds = replace(kinds, modules=module_class(kinds.modules, places.modules))
    planned = PlannedLora(
        pool=batch.pool,
        segments=batch.segments,
        alignment=batch.alignment,
        extras=batch.extras,
        tiles=torch.from_numpy(tiles_of(starts, stops, slots, size, num_rows if fixed else 0)),
        tile_size=size,
        kinds=kinds,
        row_slots=torch.from_numpy(slots_of_rows(starts, stops, slots, num_rows) if routed else slots[:0]),
        most_adapters=num_rows if fixed else len(starts),
    )
    return planned, updates


def plan_attention(
    batch: AttentionBatch, limits: BatchLimits, fixed: bool, part_keys: int = PART_KEYS
) -> PagedBatch:
    """The tables of a batch, on the host."""
    starts, lengths = (np.array(values, np.int32) for values in (batch.query_starts, batch.kv_lens))
    counts = np.diff(starts)
    most = int(counts.max())
    single = np.zeros((int((counts == 1).sum()), 2), np.int32)
    single[:, 0] = np.flatnonzero(counts == 1)
    long = np.flatnonzero(counts > 1).tolist() if most > 1 else ()
    tilings: dict[tuple[int, int], Tiling] = {}
    many: list[tuple[int, int]] = []
    for shape in limits.head_shapes:
        group, rows = limits.num_heads // shape[0], _block_rows(limits, *shape)
        start = len(many)
        many += [(s, first) for s in long for first in range(0, counts[s], rows // group)]
        tilings[shape] = Tiling(start, len(many), rows)
    longest = batch.block_table.shape[1] * limits.tokens_per_block if fixed else int(lengths.max())
    return PagedBatch(
        query_starts=batch.query_starts,
        kv_lens=batch.kv_lens,
        block_table=batch.block_table,
        slots=batch.slots,
        starts=torch.from_numpy(starts),
        lengths=torch.from_numpy(lengths),
        single_tiles=torch.from_numpy(single),
        tiles=torch.from_numpy(np.array(many, np.int32).reshape(-1, 2)),
        part_keys=part_keys,
        tilings=tilings,
        max_queries=most,
        max_keys=longest,
    )


def _block_rows(limits: BatchLimits, kv_heads: int, dim: int) -> int:
    """Rows per tile, fewer for wide heads, so that a tile fits in registers."""
    least = FLOAT32_BLOCK_ROWS if limits.dtype == torch.float32 else BLOCK_ROWS
    least = least if dim <= WIDE else least // 2
    return max(least, 1 << (limits.num_heads // kv_heads - 1).bit_length())
