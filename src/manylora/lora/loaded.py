"""Adapters in pages that the device can read, as used by a forward pass."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from manylora.kernels.extras import Extra, ExtraSegment
from manylora.kernels.row_format import RowFormat
from manylora.kernels.spec import LoraBatch, LoraRow, LoraSegment
from manylora.kernels.transfer import upload
from manylora.lora.extras import is_virtual
from manylora.lora.geometry import Layout
from manylora.lora.pool import NOTHING_SHARED, AdapterPool, SharedOf
from manylora.lora.tensors import Adapter, FileAdapter

MAX_MIXES = 256  # cached tables


@dataclass(frozen=True, eq=False)
class LoadedAdapter:
    """Locations of an adapter's rows, and its extras. members: the adapters of a mix."""

    rows: dict[tuple[int, int], LoraRow]
    extras: dict[str, Extra]
    members: tuple[LoadedAdapter, ...] = ()

    @classmethod
    def at(
        cls, pool: AdapterPool, layout: Layout, pages: Sequence[int], shared: SharedOf = NOTHING_SHARED
    ) -> LoadedAdapter:
        """pages, including those of shared matrices, are pages of the pool's `flat`."""
        return cls(pool.rows(layout, pages, shared), pool.extras(layout, pages))

    @classmethod
    def mixed(cls, members: Sequence[tuple[LoadedAdapter, float]]) -> LoadedAdapter:
        """Several adapters that act together, each with the factor on its change of a layer. None of them has
        extras.

        Only tables are built: the adapters are stored once for all their mixes.
        """
        found: dict[tuple[int, int], list[LoraRow]] = {}
        for one, scale in members:
            formats: dict[RowFormat, RowFormat] = {}
            for place, row in one.rows.items():
                known = formats.get(row.format)
                if known is None:
                    scaled = replace(row.format, scale=row.format.scale * scale, mixed=True)
                    known = formats[row.format] = scaled
                found.setdefault(place, []).append(replace(row, format=known))
        rows = {place: replace(first, more=tuple(more)) for place, (first, *more) in found.items()}
        return cls(rows, {}, tuple(one for one, _ in members))


class Mixes:
    """The mixes of the last steps. An adapter's table is the same object in consecutive steps, by which
    operations recognise it.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[tuple[int, float], ...], LoadedAdapter] = OrderedDict()

    def find(self, members: Sequence[tuple[LoadedAdapter, float]]) -> LoadedAdapter:
        """members: as in `LoadedAdapter.mixed`. A single member with scale 1 is returned itself."""
        if len(members) == 1 and members[0][1] == 1:
            return members[0][0]
        key = tuple((id(one), scale) for one, scale in members)  # `members` keeps these objects alive
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = LoadedAdapter.mixed(members)
            if len(self._known) > MAX_MIXES:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return found


class OtherRanks(Protocol):
    """What the other ranks of a group must do with their parts of an adapter."""

    def write(self, adapter: Adapter | FileAdapter, pages: Sequence[int]) -> None:
        """Write it to these host pages, and wait until all ranks have. If it is an AdapterPart, they were
        told to keep it.

        Thread-safe. Raises RequestError.
        """

    def keep(self, part: Adapter, pages: Sequence[int]) -> None:
        """Read it back from its host pages and keep it as long as `part` exists here."""

    def load(self, digest: str, host_pages: Sequence[int], device_pages: Sequence[int]) -> None:
        """Copy it to these device pages before the next step."""


def lora_batch(pool: AdapterPool, segments: Iterable[tuple[int, int, LoadedAdapter]]) -> LoraBatch | None:
    """The batch for token rows [start, stop) and their adapters, ascending. None if there are none."""
    loaded = list(segments)
    if not loaded:
        return None
    return LoraBatch(
        pool.flat,
        tuple(LoraSegment(start, stop, one.rows) for start, stop, one in loaded),
        pool.alignment,
        tuple(ExtraSegment(start, stop, one.extras) for start, stop, one in loaded if one.extras),
    )


def with_virtual(batch: LoraBatch | None, virtual: Sequence[tuple[int, int]]) -> LoraBatch | None:
    """The batch of a pass in which some rows are virtual tokens: (row, token number) pairs, ascending.

    Extras that no row needs are omitted, so that other passes run as without them.
    """
    if batch is None or not batch.extras:
        return batch
    extras = []
    for one in batch.extras:
        mine = [(row, number) for row, number in virtual if one.start <= row < one.stop]
        if mine:
            rows, numbers = (upload(part, torch.long, batch.pool.device) for part in zip(*mine, strict=True))
            extras.append(replace(one, virtual=(rows, numbers)))
        elif not all(map(is_virtual, one.values)):
            extras.append(one)
    return replace(batch, extras=tuple(extras))
