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
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from manylora.errors import AdapterCacheFullError
from manylora.lora.pages import PageAllocator
from manylora.lora.space import Held, Need, SharedPages, Space
from manylora.stats import CacheChange

MAX_CHANGES = 256


@dataclass
class CachedAdapter:
    """An adapter on one level. content: stored by the caller for as long as the adapter is here."""

    held: Held
    content: Any
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


@dataclass
class _Journal:
    """The latest changes of both levels, for observers."""

    changes: deque[CacheChange] = field(default_factory=lambda: deque(maxlen=MAX_CHANGES))
    numbers: count[int] = field(default_factory=lambda: count(1))

    def note(self, level: str, loaded: bool, digest: str, pages: int) -> None:
        change = CacheChange(next(self.numbers), time.monotonic(), level, loaded, digest, (), pages)
        self.changes.append(change)


class _Level:
    """One level: its pages, and entries in order of release, oldest first."""

    def __init__(self, name: str, num_pages: int, journal: _Journal) -> None:
        self._name, self._journal = name, journal
        self._space = Space(num_pages)
        self.entries: OrderedDict[str, CachedAdapter] = OrderedDict()
        self.num_stores = self.num_hits = self.num_evictions = 0

    @property
    def pages(self) -> PageAllocator:
        return self._space.pages

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

    def put(self, digest: str, need: Need | int, content: Any) -> CachedAdapter:
        entry = self.entries[digest] = CachedAdapter(self._space.claim(_need(need)), content)
        self._journal.note(self._name, True, digest, len(entry.pages))
        self.num_stores += 1
        return entry

    def count_hit(self, digest: str) -> None:
        self.entries[digest].hits += 1
        self.num_hits += 1

    def evict(self, digest: str) -> None:
        entry = self.entries.pop(digest)
        self._space.release(entry.held)
        self._journal.note(self._name, False, digest, len(entry.pages))
        self.num_evictions += 1

    def check(self) -> None:
        self._space.check(entry.held for entry in self.entries.values())


def _need(need: Need | int) -> Need:
    return need if isinstance(need, Need) else Need(need)


class AdapterCache:
    """Host and device level with the same page geometry."""

    def __init__(self, host_pages: int, device_pages: int) -> None:
        self._journal = _Journal()
        self.kept_pages = 0  # of adapters kept until they are unpinned
        self.host = _Level("host", host_pages, self._journal)
        self.device = _Level("device", device_pages, self._journal)

    @property
    def changes(self) -> tuple[CacheChange, ...]:
        """The latest changes, oldest first, without names."""
        return tuple(self._journal.changes)

    @property
    def unkept_pages(self) -> int:
        """Pages of the smaller level, minus `kept_pages`."""
        return min(self.host.pages.num_pages, self.device.pages.num_pages) - self.kept_pages

    def can_ever_hold(self, num_pages: int) -> bool:
        return num_pages <= self.unkept_pages

    def on_host(self, digest: str) -> bool:
        return digest in self.host.entries

    def on_device(self, digest: str) -> bool:
        return digest in self.device.entries

    def host_victims(self, need: Need | int, waited_for: Container[str], *, force: bool) -> list[str] | None:
        """What to evict from the host to make room. None: impossible. waited_for: adapters evicted only if
        `force` is set and nothing else suffices.
        """
        victims = self.host.victims(need, waited_for)
        return self.host.victims(need) if victims is None and force else victims

    def evict(self, digest: str) -> None:
        """Drop an unpinned adapter from both levels."""
        if self.on_device(digest):
            self.device.evict(digest)
        self.host.evict(digest)

    def load(self, digest: str, content: Any) -> CachedAdapter:
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

    def check(self) -> None:
        """Assert that pages add up, and that everything on the device is on the host."""
        self.host.check()
        self.device.check()
        for digest, entry in self.device.entries.items():
            assert self.on_host(digest)
            assert entry.pins <= self.host.entries[digest].pins
