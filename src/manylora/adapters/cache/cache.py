"""AdapterCache: which adapters are on which level and pages, and how often they are pinned. No tensors.

There are two levels, each an ordered map from digest to pages and pins. Everything on the device is also on
the host. An unpinned adapter may be evicted, least recently released first. On the host, adapters that
requests wait for are evicted last, and only if the caller says so.

    absent ── store ──▶ on the host ── load ──▶ on the device
      ◀── evicted ───────────┘  ◀── evicted ─────────┘
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Generic, TypeVar

from manylora.adapters.pages import Held, Need, PageAllocator, SharedPages, Space
from manylora.errors import AdapterCacheFullError
from manylora.stats import CacheChange, CacheMap, MappedAdapter, Runs

MAX_CHANGES = 256

Content = TypeVar("Content")
OnHost = TypeVar("OnHost")
OnDevice = TypeVar("OnDevice")


@dataclass
class CachedAdapter(Generic[Content]):
    """An adapter on one level. content: what the caller keeps for as long as the adapter is here."""

    held: Held
    content: Content
    pins: int = 0
    hits: int = 0

    @property
    def pages(self) -> Sequence[int]:
        """Its own pages."""
        return self.held.pages

    @property
    def shared(self) -> Mapping[str, SharedPages]:
        """Pages that other adapters may use, too, by key."""
        return self.held.shared


Note = Callable[[str, bool, str, int], None]
"""Told of each change of a level: its name, whether an adapter came, its digest and pages."""


class CacheLevel(Generic[Content]):
    """One level: its pages, and entries in order of release, oldest first."""

    def __init__(self, name: str, num_pages: int, note: Note) -> None:
        self._name, self._note = name, note
        self._space = Space(num_pages)
        self.pages: PageAllocator = self._space.pages
        self.entries: OrderedDict[str, CachedAdapter[Content]] = OrderedDict()
        self.num_stores = self.num_hits = self.num_evictions = 0

    @property
    def num_pinned(self) -> int:
        return sum(entry.pins > 0 for entry in self.entries.values())

    def pin(self, digest: str) -> None:
        self.entries[digest].pins += 1

    def unpin(self, digest: str) -> None:
        entry = self.entries[digest]
        assert entry.pins > 0, f"{digest} is not pinned"
        entry.pins -= 1
        if entry.pins == 0:
            self.entries.move_to_end(digest)

    def victims(self, need: Need | int | Sequence[Need], spare: Container[str] = ()) -> list[str] | None:
        """Unpinned entries to evict to make room, except those in `spare`. None: not enough.

        need: of one adapter, of several together, or a number of pages.
        """
        lacking = self._space.lacking([_need(need)] if isinstance(need, Need | int) else need)
        chosen: list[str] = []
        for digest, entry in self.entries.items():
            if lacking.pages <= 0:
                break
            if entry.pins == 0 and digest not in spare:
                chosen.append(digest)
                lacking.without(entry.held)
        return chosen if lacking.pages <= 0 else None

    def put(self, digest: str, need: Need | int, content: Content) -> CachedAdapter[Content]:
        """Claim pages for an adapter, for which there is room."""
        entry = self.entries[digest] = CachedAdapter(self._space.claim(_need(need)), content)
        self._note(self._name, True, digest, len(entry.pages))
        self.num_stores += 1
        return entry

    def evict(self, digest: str) -> None:
        entry = self.entries.pop(digest)
        self._space.release(entry.held)
        self._note(self._name, False, digest, len(entry.pages))
        self.num_evictions += 1

    def check(self) -> None:
        """Assert that pages add up."""
        self._space.check([entry.held for entry in self.entries.values()])


def _need(need: Need | int) -> Need:
    return need if isinstance(need, Need) else Need(need)


class AdapterCache(Generic[OnHost, OnDevice]):
    """Host and device level with the same page geometry. Each has its own type of content.

    changes: the latest of both levels, oldest first, without names.
    """

    def __init__(self, host_pages: int, device_pages: int) -> None:
        self.changes: deque[CacheChange] = deque(maxlen=MAX_CHANGES)
        self._numbers = count(1)
        self.kept_pages = 0  # of adapters kept until they are unpinned
        self.host: CacheLevel[OnHost] = CacheLevel("host", host_pages, self._note)
        self.device: CacheLevel[OnDevice] = CacheLevel("device", device_pages, self._note)

    def _note(self, level: str, loaded: bool, digest: str, pages: int) -> None:
        change = CacheChange(next(self._numbers), time.monotonic(), level, loaded, digest, (), pages)
        self.changes.append(change)

    @property
    def unkept_pages(self) -> int:
        """Pages of the smaller level, minus `kept_pages`."""
        return min(self.host.pages.num_pages, self.device.pages.num_pages) - self.kept_pages

    @property
    def sizes(self) -> str:
        """Both levels' sizes, for errors."""
        kept = f", of which pinned adapters have {self.kept_pages}" if self.kept_pages else ""
        host, device = self.host.pages.num_pages, self.device.pages.num_pages
        return f"the host level has {host} and the device level {device}{kept}"

    def can_ever_hold(self, num_pages: int) -> bool:
        return num_pages <= self.unkept_pages

    def on_host(self, digest: str) -> bool:
        return digest in self.host.entries

    def on_device(self, digest: str) -> bool:
        return digest in self.device.entries

    def host_victims(self, need: Need | int, waited_for: Container[str], *, force: bool) -> list[str] | None:
        """What to evict from the host; None: impossible. waited_for: evicted last, and only if `force`."""
        victims = self.host.victims(need, waited_for)
        return self.host.victims(need) if victims is None and force else victims

    def evict(self, digest: str) -> None:
        """Drop an unpinned adapter from both levels."""
        if self.on_device(digest):
            self.device.evict(digest)
        self.host.evict(digest)

    def load(self, digest: str, content: OnDevice) -> CachedAdapter[OnDevice]:
        """Claim device pages for an adapter on the host, not pinned yet. Evicts as needed.

        Raises AdapterCacheFullError, and changes nothing, if everything that could make room is in use.
        """
        need = self.host.entries[digest].held.need
        victims = self.device.victims(need)
        if victims is None:
            raise AdapterCacheFullError("Cache is full. There are no done tasks to evict")
        for victim in victims:
            self.device.evict(victim)
        return self.device.put(digest, need, content)

    def map(self, names: Mapping[str, Sequence[str]]) -> CacheMap:
        """The adapter on each page. names: of adapters, by digest."""
        host, device = self.host.entries, self.device.entries
        adapters = []
        for digest, entry in host.items():
            copy = device.get(digest)
            pages, hits = (_runs(copy.pages), copy.hits) if copy is not None else ((), 0)
            named = tuple(names.get(digest, ()))
            adapters.append(MappedAdapter(digest, named, _runs(entry.pages), pages, entry.pins, hits))
        shared = {key: one for entry in host.values() for key, one in entry.shared.items()}
        copies = {key: _runs(one.pages) for entry in device.values() for key, one in entry.shared.items()}
        for key, one in shared.items():
            adapters.append(MappedAdapter(key, (), _runs(one.pages), copies.get(key, ()), one.users, 0))
        changes = tuple(replace(one, names=tuple(names.get(one.digest, ()))) for one in self.changes)
        return CacheMap(self.host.pages.num_pages, self.device.pages.num_pages, tuple(adapters), changes)

    def check(self) -> None:
        """Assert that pages add up, and that everything on the device is on the host."""
        self.host.check()
        self.device.check()
        for digest, entry in self.device.entries.items():
            assert self.on_host(digest)
            assert entry.pins <= self.host.entries[digest].pins


def _runs(pages: Sequence[int]) -> Runs:
    runs: list[tuple[int, int]] = []
    for page in sorted(pages):
        if runs and runs[-1][1] == page:
            runs[-1] = (runs[-1][0], page + 1)
        else:
            runs.append((page, page + 1))
    return tuple(runs)
