"""What the adapter kernels read of a batch: tiles of rows under one adapter, and where its matrices lie.

Pure NumPy. An adapter's places are written into a slot of a table when it first appears and stay there, so a
step uploads its tiles and nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from manylora.kernels.row_format import TABLE_ROW, Encoding
from manylora.kernels.spec import LoraRow, LoraSegment

__all__ = [
    "MODULES",
    "PLACE",
    "TILE",
    "LoraPlan",
    "Places",
    "SlotUpdate",
    "expert_tile_size",
    "plan_lora",
    "rank_class",
    "tile_size",
    "tile_size_of",
]

MODULES = 32  # module ids are below this
PLACE = TABLE_ROW.itemsize // 8  # integers of one place
TILE = 4  # integers of one tile: first row, number of rows, slot, which of the pieces (experts) at a place
# Rows of one tile. One: a row reads its matrices alone, as vectors. More: tensor cores share them.
TILE_SIZES = (1, 16, 64)
EXPERT_TILE_SIZES = (16, 64)
RANK_CLASSES = (16, 64, 512)

Rows = Mapping[tuple[int, int], LoraRow]


@dataclass(frozen=True)
class SlotUpdate:
    """places [layers, MODULES, PLACE] int64, to be written into this slot before the kernels run."""

    slot: int
    places: np.ndarray


@dataclass(frozen=True)
class LoraPlan:
    """tiles [n, TILE] int32: first row, number of rows, slot, 0; a tile of 0 rows is padding.

    row_slots [rows] int32: the slot of each row, -1 without an adapter.
    tile_size: the most rows a tile has. rank: no rank of the batch is larger; one of a few classes.
    modules: ids that any adapter of the batch has anywhere. encodings: of rows that are
    not plain.
    """

    tiles: np.ndarray
    row_slots: np.ndarray
    tile_size: int
    rank: int
    modules: frozenset[int]
    encodings: frozenset[Encoding]
    updates: tuple[SlotUpdate, ...]


@dataclass(frozen=True)
class _Slot:
    rows: Rows  # held, so that its id is not given to another mapping
    slot: int
    rank: int
    modules: frozenset[int]
    encodings: frozenset[Encoding]


class Places:
    """Which adapter has which slot. The one that was not used for longest gives way.

    num_slots: at least as many as a batch has adapters.
    """

    def __init__(self, num_slots: int, num_layers: int) -> None:
        self.num_slots = num_slots
        self.num_layers = num_layers
        self._entries: OrderedDict[int, _Slot] = OrderedDict()

    def take(self, batch: Sequence[Rows]) -> tuple[list[_Slot], tuple[SlotUpdate, ...]]:
        """The entries of a batch's adapters, and the slots that must be written first."""
        if len(batch) > self.num_slots:
            raise ValueError(f"a batch has at most {self.num_slots} adapters here, got {len(batch)}")
        for rows in batch:  # what is here must not give way to what is new
            if id(rows) in self._entries:
                self._entries.move_to_end(id(rows))
        updates = tuple(self._enter(rows) for rows in batch if id(rows) not in self._entries)
        return [self._entries[id(rows)] for rows in batch], updates

    def _enter(self, rows: Rows) -> SlotUpdate:
        slot = len(self._entries)
        if slot == self.num_slots:
            slot = self._entries.popitem(last=False)[1].slot
        places = np.zeros((self.num_layers, MODULES), TABLE_ROW)
        for (layer, module), row in rows.items():
            places[layer, module] = row.format.table_row(row.offset)
        formats = {row.format for row in rows.values()}
        rank = max((one.rank for one in formats), default=0)
        modules = frozenset(module for _, module in rows)
        encodings = frozenset(one.encoding for one in formats) - {Encoding.PLAIN}
        self._entries[id(rows)] = _Slot(rows, slot, rank, modules, encodings)
        return SlotUpdate(slot, places.view(np.int64).reshape(self.num_layers, MODULES, PLACE))


def plan_lora(
    segments: Sequence[LoraSegment], places: Places, num_rows: int, fixed: bool = False
) -> LoraPlan:
    """The tiles of a batch of so many rows.

    fixed: one row for each sequence; pad to a tile for each row.
    """
    entries, updates = places.take([segment.rows for segment in segments])
    size = tile_size([segment.stop - segment.start for segment in segments])
    if fixed:
        size = min(size, TILE_SIZES[1])
    parts, row_slots = [], np.full(num_rows, -1, np.int32)
    for segment, entry in zip(segments, entries, strict=True):
        starts = np.arange(segment.start, segment.stop, size, np.int32)
        counts = np.minimum(segment.stop - starts, size)
        slots = np.full_like(starts, entry.slot)
        parts.append(np.stack((starts, counts, slots, np.zeros_like(starts)), axis=1))
        row_slots[segment.start : segment.stop] = entry.slot
    tiles = np.concatenate(parts).astype(np.int32)
    if fixed:
        tiles = np.concatenate((tiles, np.zeros((num_rows - len(tiles), TILE), np.int32)))
    return LoraPlan(
        tiles=tiles,
        row_slots=row_slots,
        tile_size=size,
        rank=rank_class(max(entry.rank for entry in entries)),
        modules=frozenset().union(*(entry.modules for entry in entries)),
        encodings=frozenset().union(*(entry.encodings for entry in entries)),
        updates=updates,
    )


def tile_size(lengths: Sequence[int]) -> int:
    """By the mean rows of an adapter: distinct adapters decode row by row, prompts go in large tiles."""
    return tile_size_of(sum(lengths) / len(lengths))


def tile_size_of(mean: float) -> int:
    """By the mean rows of what shares matrices."""
    return TILE_SIZES[0] if mean < 2 else TILE_SIZES[1] if mean < 48 else TILE_SIZES[2]


def expert_tile_size(mean: float) -> int:
    """By the mean rows of an expert, whose weight always goes through tensor cores."""
    return EXPERT_TILE_SIZES[0] if mean < 32 else EXPERT_TILE_SIZES[1]


def rank_class(rank: int) -> int:
    """Few classes, so that few variants of kernels and graphs exist; beyond them the next power of two."""
    return next((bound for bound in RANK_CLASSES if rank <= bound), 1 << (rank - 1).bit_length())
