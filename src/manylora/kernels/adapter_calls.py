"""AdapterCalls: arguments of the compiled adapter kernel for a batch, kept while its sequences stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from manylora.kernels.row_format import TABLE_ROW
from manylora.kernels.spec import LoraBatch, LoraRow, LoraSegment, LoraTarget

LARGEST_RANK = 8192  # limited by the C kernels' arrays on the stack
MAX_CACHED_ADAPTERS = 1024
PART = np.dtype([("column", "i8"), ("width", "i8"), ("row", TABLE_ROW)])

# The adapter's rows; its table for the C kernel, or None; how many of its entries are not another's `next`;
# whether it has rows that the C kernel does not support.
_Parts = tuple[Any, np.ndarray | None, int, bool]


@dataclass(frozen=True, eq=False)
class AdapterCall:
    """Arguments of one call of native/lora.c, for targets of a layer that share no column.

    segments: [count, 4] of start, stop, address of the parts, number of parts. parts: the arrays at these
    addresses.
    others: segments that torch computes.
    """

    targets: tuple[LoraTarget, ...]
    segments: np.ndarray
    parts: list[np.ndarray]
    most_parts: int
    most_rows: int
    others: tuple[LoraSegment, ...]


class AdapterCalls:
    """The calls of the last batch, and the tables of the adapters so far."""

    def __init__(self) -> None:
        self._parts: dict[tuple[int, tuple[LoraTarget, ...]], dict[int, _Parts]] = {}
        self._calls: dict[tuple[int, tuple[LoraTarget, ...]], list[AdapterCall]] = {}  # for `_segments`
        self._segments: tuple[LoraSegment, ...] = ()
        self._known: tuple[tuple[int, int, int], ...] = ()

    def find(self, batch: LoraBatch, layer: int, targets: tuple[LoraTarget, ...]) -> list[AdapterCall]:
        """Cached until a step has other segments: nothing is recomputed while the same sequences decode."""
        if batch.segments is not self._segments:
            # The last segments are still alive, so equal ids mean the same adapters.
            known = tuple((one.start, one.stop, id(one.rows)) for one in batch.segments)
            if known != self._known:
                self._calls.clear()
            self._segments, self._known = batch.segments, known
        calls = self._calls.get((layer, targets))
        if calls is None:
            calls = [self._plan(batch, layer, apart) for apart in _without_overlap(targets)]
            self._calls[layer, targets] = calls
        return calls

    def _plan(self, batch: LoraBatch, layer: int, targets: tuple[LoraTarget, ...]) -> AdapterCall:
        table = self._parts.setdefault((layer, targets), {})
        ours: list[tuple[int, int, int, int]] = []
        others: list[LoraSegment] = []
        arrays: list[np.ndarray] = []
        most = rows = 0
        for segment in batch.segments:
            known = table.get(id(segment.rows))
            if known is None or known[0] is not segment.rows:
                known = _find_parts(table, segment, layer, targets)
            _, parts, count, too_large = known
            if too_large:
                others.append(segment)
            elif parts is not None:
                arrays.append(parts)
                ours.append((segment.start, segment.stop, parts.ctypes.data, count))
                most, rows = max(most, count), max(rows, segment.stop - segment.start)
        segments = np.array(ours, np.int64).reshape(-1, 4)
        return AdapterCall(targets, segments, arrays, most, rows, tuple(others))


def _find_parts(
    known_parts: dict[int, _Parts], segment: LoraSegment, layer: int, targets: Sequence[LoraTarget]
) -> _Parts:
    """The adapter's matrices for these targets. Cached together with `rows`, so that its id is not
    reused.
    """
    if len(known_parts) >= MAX_CACHED_ADAPTERS:
        known_parts.clear()
    found = [(t, segment.rows.get((layer, t.module_id))) for t in targets]
    places = [(t, row) for t, row in found if row is not None]
    too_large = any(one.format.rank > LARGEST_RANK for _, row in places for one in row.members)
    table = _table(places) if places else None
    known: _Parts = (segment.rows, table, len(places), too_large)
    known_parts[id(segment.rows)] = known
    return known


def _table(places: list[tuple[LoraTarget, LoraRow]]) -> np.ndarray:
    """PART entries: the first one of each target, then those that are mixed with them."""
    parts, end = [], len(places)
    for place, (target, row) in enumerate(places):
        first = end - place if row.more else 0
        parts.append((target.start, target.width, row.format.table_row(row.offset, first, row.vectors)))
        end += len(row.more)
    for target, row in places:
        last = len(row.more) - 1
        for number, one in enumerate(row.more):
            member = one.format.table_row(one.offset, int(number < last), one.vectors)
            parts.append((target.start, target.width, member))
    return np.array(parts, PART)


@cache
def _without_overlap(targets: tuple[LoraTarget, ...]) -> list[tuple[LoraTarget, ...]]:
    """Group the targets, in order, such that the targets of one call share no column. Otherwise threads would
    write to the same place, for example for a fused projection and its parts.
    """
    calls: list[list[LoraTarget]] = [[]]
    for target in targets:
        start, stop = target.start, target.start + target.width
        if any(one.start < stop and start < one.start + one.width for one in calls[-1]):
            calls.append([])
        calls[-1].append(target)
    return [tuple(call) for call in calls]
