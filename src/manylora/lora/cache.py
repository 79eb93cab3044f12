"""AdapterCache: which adapters are where, on which pages, and who holds them. Numbers only, no tensors.

Two levels, each an ordered map from digest to its pages and pins. What is on the device is on the host too.
An adapter without pins may be evicted; the one released longest ago goes first.

    absent ── store ──▶ on the host ── load ──▶ on the device
      ◀── evicted ───────────┘  ◀── evicted ─────────┘
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from manylora.errors import AdapterCacheFullError
from manylora.pages import PageAllocator

__all__ = ["AdapterCache"]


@dataclass
class _Entry:
    pages: list[int]
    pins: int = 0


class _Level:
    """One level: pages, and entries in order of release, the oldest first."""

    def __init__(self, num_pages: int) -> None:
        self.pages = PageAllocator(num_pages)
        self.entries: OrderedDict[str, _Entry] = OrderedDict()
        self.num_evictions = 0

    def pin(self, digest: str) -> None:
        self.entries[digest].pins += 1

    def unpin(self, digest: str) -> None:
        entry = self.entries[digest]
        assert entry.pins > 0, f"{digest} is not pinned"
        entry.pins -= 1
        if entry.pins == 0:
            self.entries.move_to_end(digest)

    def victims(self, num_pages: int) -> list[str] | None:
        """Unpinned entries to evict for `num_pages` free pages; None when even all of them do not suffice."""
        missing = num_pages - self.pages.num_free
        chosen: list[str] = []
        for digest, entry in self.entries.items():
            if missing <= 0:
                break
            if entry.pins == 0:
                chosen.append(digest)
                missing -= len(entry.pages)
        return chosen if missing <= 0 else None

    def evict(self, digest: str) -> None:
        self.pages.release(self.entries.pop(digest).pages)
        self.num_evictions += 1

    def check(self) -> None:
        self.pages.check()
        held = [page for entry in self.entries.values() for page in entry.pages]
        assert len(held) == len(set(held)) == self.pages.num_used


class AdapterCache:
    """Host and device level of the same page geometry."""

    def __init__(self, host_pages: int, device_pages: int) -> None:
        self.host = _Level(host_pages)
        self.device = _Level(device_pages)

    def can_ever_hold(self, num_pages: int) -> bool:
        return num_pages <= min(self.host.pages.num_pages, self.device.pages.num_pages)

    def on_host(self, digest: str) -> bool:
        return digest in self.host.entries

    def on_device(self, digest: str) -> bool:
        return digest in self.device.entries

    def host_pages(self, digest: str) -> list[int]:
        return self.host.entries[digest].pages

    def device_pages(self, digest: str) -> list[int]:
        return self.device.entries[digest].pages

    def store(self, digest: str, num_pages: int) -> list[int]:
        """Pages on the host for a new adapter, not pinned yet. Evicts as needed, on both levels.

        Raises AdapterCacheFullError, and changes nothing, when all that could make room is in use.
        """
        victims = self.host.victims(num_pages)
        if victims is None:
            raise AdapterCacheFullError("Cache is full. There are no done tasks to evict")
        for victim in victims:
            if self.on_device(victim):
                self.device.evict(victim)
            self.host.evict(victim)
        pages = self.host.pages.claim(num_pages)
        assert pages is not None
        self.host.entries[digest] = _Entry(pages)
        return pages

    def load(self, digest: str) -> list[int]:
        """Pages on the device for an adapter of the host, not pinned yet. Raises like `store`."""
        num_pages = len(self.host_pages(digest))
        victims = self.device.victims(num_pages)
        if victims is None:
            raise AdapterCacheFullError("Cache is full. There are no done tasks to evict")
        for victim in victims:
            self.device.evict(victim)
        pages = self.device.pages.claim(num_pages)
        assert pages is not None
        self.device.entries[digest] = _Entry(pages)
        return pages

    def check(self) -> None:
        """Assert that pages add up, and that the device holds nothing the host does not."""
        self.host.check()
        self.device.check()
        for digest, entry in self.device.entries.items():
            assert self.on_host(digest)
            assert entry.pins <= self.host.entries[digest].pins
