"""The tables of the adapter kernels for a batch: tiles of rows of one adapter, and locations of its matrices.

Pure NumPy. The locations of an adapter's matrices are written to a slot of a device table when it first
appears and stay there, so a step uploads only its tiles.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from manylora.kernels.row_format import TABLE_ROW, Encoding
from manylora.kernels.spec import LoraRow

MODULES = 64  # module ids are below this; a power of two, so that kernels can shift
PLACE = TABLE_ROW.itemsize // 8  # integers of one place
TILE = 4  # integers per tile: first row, number of rows, slot, piece (expert)
# Rows of a tile. One row: computed as vectors. More rows: with tensor cores, which share the matrices.
TILE_SIZES = (1, 16, 64)
EXPERT_TILE_SIZES = (16, 64)
RANK_CLASSES = (16, 64, 512)
MIXED_BLOCK = 32  # a multiple of the ranks per block

# The modules of attention's input, and of all attention, as ids of `adapters.modules`. With the set of all
# modules seen so far, these are the sets for which a recorded step is planned.
MODULE_CLASSES = (frozenset(range(4)), frozenset(range(5)))

Rows = Mapping[tuple[int, int], LoraRow]
SlotUpdate = tuple[int, np.ndarray]
"""A slot, and the places [layers, MODULES, PLACE] int64 to be written to it before the kernels run."""


@dataclass(frozen=True)
class RowKinds:
    """What the kernels must support for the rows of an adapter, or of a batch.

    rank: upper bound of the ranks, including sums over mixed adapters; of a batch, one of a few classes.
    modules: ids on any layer. encodings: of rows that are not plain. mixed: whether rows have several
    members, or scales of their own. weighed: whether rows have weights for what they add: those with shared
    matrices, and mixed DoRA.
    """

    rank: int = 16
    modules: frozenset[int] = frozenset()
    encodings: frozenset[Encoding] = frozenset()
    mixed: bool = False
    weighed: bool = False

    @classmethod
    def of_rows(cls, rows: Rows) -> RowKinds:
        """Of one adapter."""
        formats = {one.format for row in rows.values() for one in row.members}
        scaled = any(one.scale != 1 and one.encoding == Encoding.PLAIN for one in formats)
        return cls(
            rank=max(map(_rank, rows.values()), default=0),
            modules=frozenset(module for _, module in rows),
            encodings=frozenset(one.encoding for one in formats) - {Encoding.PLAIN},
            mixed=scaled or any(row.more for row in rows.values()),
            weighed=any(one.shared or (one.dora and one.mixed) for one in formats),
        )

    @classmethod
    def of_batch(cls, adapters: Sequence[RowKinds]) -> RowKinds:
        return cls(
            rank=rank_class(max(one.rank for one in adapters)),
            modules=frozenset().union(*{one.modules for one in adapters}),
            encodings=frozenset().union(*{one.encodings for one in adapters}),
            mixed=any(one.mixed for one in adapters),
            weighed=any(one.weighed for one in adapters),
        )


@dataclass(frozen=True)
class Slot:
    rows: Rows  # a reference, so that its id is not reused
    slots: tuple[int, ...]  # of the first members of its rows, the second ones, ...
    kinds: RowKinds

    @property
    def slot(self) -> int:
        return self.slots[0]


class Places:
    """Assigns slots to adapters; the least recently used one is evicted. A mixed adapter takes a slot per
    mix. The number of slots grows when a batch needs more.
    """

    def __init__(self, num_slots: int, num_layers: int) -> None:
        self.num_slots = num_slots
        self.num_layers = num_layers
        self.modules = frozenset[int]()  # of all adapters so far
        self._slots: OrderedDict[int, Slot] = OrderedDict()
        self._free = list(range(num_slots))[::-1]

    def take(self, batch: Sequence[Rows]) -> tuple[list[Slot], tuple[SlotUpdate, ...]]:
        """The slots of a batch's adapters, and the slots that must be written first."""
        for rows in batch:  # so that no adapter of the batch is evicted
            if id(rows) in self._slots:
                self._slots.move_to_end(id(rows))
        used = {id(rows) for rows in batch}
        updates = [one for rows in batch if id(rows) not in self._slots for one in self._enter(rows, used)]
        return [self._slots[id(rows)] for rows in batch], tuple(updates)

    def _enter(self, rows: Rows, used: Container[int]) -> list[SlotUpdate]:
        slots = self._claim(max((len(row.members) for row in rows.values()), default=1), used)
        places = np.zeros((len(slots), self.num_layers, MODULES), TABLE_ROW)
        for (layer, module), row in rows.items():
            for number, one in enumerate(row.members):
                after = slots[number + 1] + 1 if number < len(row.more) else 0
                places[number, layer, module] = one.format.table_row(one.offset, after, one.vectors)
        kinds = RowKinds.of_rows(rows)
        self.modules |= kinds.modules
        self._slots[id(rows)] = Slot(rows, slots, kinds)
        shape = (self.num_layers, MODULES, PLACE)
        return [(s, one.view(np.int64).reshape(shape)) for s, one in zip(slots, places, strict=True)]

    def _claim(self, count: int, used: Container[int]) -> tuple[int, ...]:
        """Slots that no adapter of the batch uses. used: ids of those adapters."""
        while len(self._free) < count:
            oldest = next(iter(self._slots), None)
            if oldest is None or oldest in used:  # this batch's adapters come last
                self._free = [*range(2 * self.num_slots - 1, self.num_slots - 1, -1), *self._free]
                self.num_slots *= 2
            else:
                self._free += self._slots.pop(oldest).slots
        return tuple(self._free.pop() for _ in range(count))


def _rank(row: LoraRow) -> int:
    """Sum over all members, each of which starts with its own block."""
    if not row.more:
        return row.format.rank
    return sum(-(-one.format.rank // MIXED_BLOCK) * MIXED_BLOCK for one in row.members)


def fixed_tiles(count: int, size: int, num_rows: int) -> int:
    """The number of tiles to launch for `count` tiles, one of two values: few, or as many as any batch with
    these rows needs.

    Tiles of one row are used for a mean below 2 rows per adapter, larger ones for at least 2.
    """
    few, most = (num_rows // 4, num_rows) if size == 1 else (num_rows // 8, num_rows // size + num_rows // 2)
    return next(number for number in (max(1, few), max(1, most), num_rows) if count <= number)


def tiles_of(
    starts: np.ndarray, stops: np.ndarray, slots: np.ndarray, size: int, fixed_rows: int
) -> np.ndarray:
    """Tiles of `size` rows of each segment, [n, TILE] int32: first row, number of rows, slot, 0; a tile of 0
    rows is padding. fixed_rows: of a batch whose tables have fixed shapes, otherwise 0.
    """
    lengths = stops - starts
    counts = -(-lengths // size)
    total = int(counts.sum())
    number = fixed_tiles(total, size, fixed_rows) if fixed_rows else total
    tiles = np.zeros((number, TILE), np.int32)
    if total == len(starts):  # as in most decode steps: nothing to repeat
        tiles[:total, 0], tiles[:total, 1], tiles[:total, 2] = starts, lengths, slots
        return tiles
    nth = np.arange(total, dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts)
    first = np.repeat(starts, counts) + nth * size
    tiles[:total, 0] = first
    tiles[:total, 1] = np.minimum(np.repeat(stops, counts) - first, size)
    tiles[:total, 2] = np.repeat(slots, counts)
    return tiles


def slots_of_rows(starts: np.ndarray, stops: np.ndarray, slots: np.ndarray, num_rows: int) -> np.ndarray:
    """The slot of each row, int32, -1 without an adapter. Segments are ascending and disjoint."""
    ends = np.stack((starts, stops), axis=1).ravel()
    counts = np.diff(ends, prepend=0, append=num_rows)  # rows before a segment, of it, before the next, ...
    values = np.full(len(counts), -1, np.int32)
    values[1::2] = slots
    return np.repeat(values, counts)


def tile_size_of(mean: float) -> int:
    """Based on the mean number of rows that share matrices: 1 for decoding, large tiles for prompts."""
    return TILE_SIZES[0] if mean < 2 else TILE_SIZES[1] if mean < 48 else TILE_SIZES[2]


def expert_tile_size(mean: float) -> int:
    """Based on the mean rows per expert, whose weight is always multiplied with tensor cores."""
    return EXPERT_TILE_SIZES[0] if mean < 32 else EXPERT_TILE_SIZES[1]


def module_class(present: frozenset[int], known: frozenset[int]) -> frozenset[int]:
    """Round modules up to one of few sets, so that few graphs are needed. Modules that no adapter has add
    nothing, but cost their launches. known: all modules of adapters so far.
    """
    return next((group & known for group in MODULE_CLASSES if present <= group), known)


def rank_class(rank: int) -> int:
    """Round ranks up to one of few classes, then to powers of 2, so that few variants of kernels and graphs
    are needed.
    """
    return next((bound for bound in RANK_CLASSES if rank <= bound), 1 << (rank - 1).bit_length())
