"""CacheView: statistics of the adapter cache, and a map of its pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from manylora.lora.cache import AdapterCache
from manylora.lora.catalog.library import AdapterLibrary
from manylora.lora.transfers import Arrivals
from manylora.stats import AdapterStats, CacheMap, MappedAdapter, Resident, Runs


class CacheView:
    """Use on the engine's thread. max_device_adapters: of the largest rank that fit the device."""

    def __init__(
        self,
        cache: AdapterCache,
        library: AdapterLibrary,
        arrivals: Arrivals,
        page_bytes: int,
        max_device_adapters: int,
    ) -> None:
        self._cache, self._library, self._arrivals = cache, library, arrivals
        self._page_bytes, self._max_device_adapters = page_bytes, max_device_adapters
        self._residents: tuple[tuple[int, ...], tuple[Resident, ...]] = ((), ())  # state, list

    def stats(self) -> AdapterStats:
        host, device = self._cache.host, self._cache.device
        return AdapterStats(
            host_pages=host.pages.num_pages,
            host_pages_free=host.pages.num_free,
            device_pages=device.pages.num_pages,
            device_pages_free=device.pages.num_free,
            page_bytes=self._page_bytes,
            host_adapters=len(host.entries),
            device_adapters=len(device.entries),
            host_pinned=sum(entry.pins > 0 for entry in host.entries.values()),
            device_pinned=sum(entry.pins > 0 for entry in device.entries.values()),
            host_stores=host.num_stores,
            host_evictions=host.num_evictions,
            device_hits=device.num_hits,
            device_loads=self._arrivals.num_loads,
            device_evictions=device.num_evictions,
            version_changes=self._library.versions.num_changes,
            source_loads=self._library.num_loads,
            inert_loads=self._library.num_inert,
            max_device_adapters=self._max_device_adapters,
            residents=self._list_residents(),
        )

    def map(self) -> CacheMap:
        """The adapter on each page. The cost grows with the pages in use: call it on demand, not per step."""
        names: dict[str, list[str]] = {}
        for task_id, digest in self._library.bound():
            names.setdefault(digest, []).append(self._library.name_of(task_id))
        host, device = self._cache.host, self._cache.device
        adapters = []
        for digest, entry in host.entries.items():
            copy = device.entries.get(digest)
            adapters.append(
                MappedAdapter(
                    digest,
                    tuple(names.get(digest, ())),
                    _runs(entry.pages),
                    _runs(copy.pages) if copy else (),
                    entry.pins,
                    copy.hits if copy else 0,
                )
            )
        shared = {key: one for entry in host.entries.values() for key, one in entry.shared.items()}
        copies = {key: one for entry in device.entries.values() for key, one in entry.shared.items()}
        for key, one in shared.items():
            copy_runs = _runs(copies[key].pages) if key in copies else ()
            adapters.append(MappedAdapter(key, (), _runs(one.pages), copy_runs, one.users, 0))
        changes = tuple(replace(c, names=tuple(names.get(c.digest, ()))) for c in self._cache.changes)
        return CacheMap(host.pages.num_pages, device.pages.num_pages, tuple(adapters), changes)

    def _list_residents(self) -> tuple[Resident, ...]:
        """The adapters in the cache. The list is rebuilt only after a change."""
        host, device = self._cache.host, self._cache.device
        state = (
            host.num_stores,
            self._library.num_binds,
            host.num_evictions,
            self._arrivals.num_loads,
            device.num_evictions,
        )
        if state != self._residents[0]:
            found = tuple(
                Resident(
                    self._library.name_of(task_id), len(host.entries[digest].pages), digest in device.entries
                )
                for task_id, digest in self._library.bound()
                if digest in host.entries
            )
            self._residents = (state, found)
        return self._residents[1]


def _runs(pages: Sequence[int]) -> Runs:
    runs: list[tuple[int, int]] = []
    for page in sorted(pages):
        if runs and runs[-1][1] == page:
            runs[-1] = (runs[-1][0], page + 1)
        else:
            runs.append((page, page + 1))
    return tuple(runs)
