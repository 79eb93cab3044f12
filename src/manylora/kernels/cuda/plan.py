"""What the adapter kernels read of a batch: tiles of rows under one adapter, and where its matrices lie.

Pure NumPy. An adapter's places are written into a slot of a table when it first appears and stay there, so a
step uploads its tiles and nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from manylora.kernels.spec import LoraRow, LoraSegment

__all__ = ["MODULES", "PLACE", "LoraPlan", "Places", "SlotUpdate", "plan_lora", "rank_class", "tile_size"]

MODULES = 32  # module ids are below this
PLACE = 3  # integers of one place: offset, rank, whether a magnitude follows
# Rows of one tile. One: a row reads its matrices alone, as vectors. More: tensor cores share them.
TILE_SIZES = (1, 16, 64)
RANK_CLASSES = (16, 64, 512)

Rows = Mapping[tuple[int, int], LoraRow]


@dataclass(frozen=True)
class SlotUpdate:
    """places [layers, MODULES, PLACE] int64, to be written into this slot before the kernels run."""

    slot: int
    places: np.ndarray


@dataclass(frozen=True)
class LoraPlan:
    """tiles [n, 3] int32: first row, number of rows, slot; a tile of 0 rows is padding.

    tile_size: the most rows a tile has. rank: no rank of the batch is larger; one of a few classes.
    modules: ids that any adapter of the batch has anywhere.
    """

    tiles: np.ndarray
    tile_size: int
    rank: int
    modules: frozenset[int]
    updates: tuple[SlotUpdate, ...]


@dataclass(frozen=True)
class _Entry:
    rows: Rows  # held, so that its id is not given to another mapping
    slot: int
    rank: int
    modules: frozenset[int]


class Places:
    """Which adapter has which slot. The one that was not used for longest gives way.

    num_slots: at least as many as a batch has adapters.
    """

    def __init__(self, num_slots: int, num_layers: int) -> None:
        self.num_slots = num_slots
        self.num_layers = num_layers
        self._entries: OrderedDict[int, _Entry] = OrderedDict()

    def take(self, batch: Sequence[Rows]) -> tuple[list[_Entry], tuple[SlotUpdate, ...]]:
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
        places = np.zeros((self.num_layers, MODULES, PLACE), np.int64)
        for (layer, module), row in rows.items():
            places[layer, module] = row.offset, row.rank, row.dora
        rank = max((row.rank for row in rows.values()), default=0)
        modules = frozenset(module for _, module in rows)
        self._entries[id(rows)] = _Entry(rows, slot, rank, modules)
        return SlotUpdate(slot, places)


def plan_lora(segments: Sequence[LoraSegment], places: Places, rows: int | None = None) -> LoraPlan:
    """The tiles of a batch.

    rows: pad to that many tiles, for a batch of that many rows and one row for each sequence.
    """
    entries, updates = places.take([segment.rows for segment in segments])
    size = tile_size([segment.stop - segment.start for segment in segments])
    if rows is not None:
        size = min(size, TILE_SIZES[1])
    parts = []
    for segment, entry in zip(segments, entries, strict=True):
        starts = np.arange(segment.start, segment.stop, size, np.int32)
        counts = np.minimum(segment.stop - starts, size)
        parts.append(np.stack((starts, counts, np.full_like(starts, entry.slot)), axis=1))
    tiles = np.concatenate(parts).astype(np.int32)
    if rows is not None:
        tiles = np.concatenate((tiles, np.zeros((rows - len(tiles), 3), np.int32)))
    return LoraPlan(
        tiles=tiles,
        tile_size=size,
        rank=rank_class(max(entry.rank for entry in entries)),
        modules=frozenset().union(*(entry.modules for entry in entries)),
        updates=updates,
    )


def tile_size(lengths: Sequence[int]) -> int:
    """By the mean rows of an adapter: distinct adapters decode row by row, prompts go in large tiles."""
    mean = sum(lengths) / len(lengths)
    return TILE_SIZES[0] if mean < 2 else TILE_SIZES[1] if mean < 48 else TILE_SIZES[2]


def rank_class(rank: int) -> int:
    """Few classes, so that few variants of kernels and graphs exist; beyond them the next power of two."""
    return next((bound for bound in RANK_CLASSES if rank <= bound), 1 << (rank - 1).bit_length())
