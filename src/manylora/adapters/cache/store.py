"""AdapterStore: the engine's leases on adapters, and the two cache levels that serve them.

A lease waits until it is admitted. While it waits, its adapter is on the host, or the lease carries it. Pins
are leases without a request, which keep adapters in the cache until they are unpinned.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from manylora.adapters.cache.cache import AdapterCache
from manylora.adapters.cache.leases import AdapterLease, Lease, MixLease, check_changes, check_mixable
from manylora.adapters.cache.pool import LoadedAdapter, Mixes, build_parts, lora_batch
from manylora.adapters.cache.transfers import AdapterLoader, OtherRanks, Transfers
from manylora.adapters.catalog.files import AdapterFolders
from manylora.adapters.catalog.levels import DiskLevel
from manylora.adapters.catalog.library import AdapterLibrary
from manylora.adapters.catalog.names import read_names
from manylora.adapters.catalog.reader import AdapterReader
from manylora.adapters.extras import with_extras
from manylora.adapters.formats.base_weights import BaseWeights
from manylora.adapters.formats.read_options import KnownLayouts
from manylora.adapters.geometry import Layout
from manylora.adapters.modules import LoraModule
from manylora.adapters.pages import least_pages, most_pages
from manylora.adapters.slicing import AdapterPart, Slicer
from manylora.adapters.tensors import Adapter, FileAdapter
from manylora.config.engine import LoraCacheConfig
from manylora.config.model import ModelConfig
from manylora.errors import (
    AdapterCacheFullError,
    AdapterError,
    AdapterNotCachedError,
    ConfigError,
    RequestError,
)
from manylora.kernels.spec import LoraBatch
from manylora.request import LoraInput, LoraMix
from manylora.stats import AdapterStats, CacheMap, Resident

logger = logging.getLogger("manylora")

LEAST_LOADED_BYTES = 2**30  # bytes of adapters that may be on the way to the cache, even a small one
NOT_LOADED = LoadedAdapter({}, {})


class AdapterStore:
    """Call methods on the engine's thread unless they say otherwise.

    Sizes the levels, allocates them, and prefetches. Raises ConfigError. modules: those of adapters, by id.
    dtype: of the pages. free_bytes: of the device, after weights and KV cache; the device level takes its
    fraction of these. base: weights with which DoRA magnitudes of PEFT directories are normalised; None
    refuses such adapters. slicer: selects this rank's part of an adapter, if several ranks share adapters.
    others: the other ranks, which do the same with their parts.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: LoraCacheConfig,
        device: torch.device,
        dtype: torch.dtype,
        free_bytes: int,
        base: BaseWeights | None = None,
        slicer: Slicer | None = None,
        others: OtherRanks | None = None,
    ) -> None:
        self._parts = parts = build_parts(model, config, device, dtype, free_bytes, base, slicer)
        self.rules, self.modules = parts.rules, parts.rules.modules
        self._slicer, self._others = slicer, others
        plan, self._pool = parts.plan, parts.pool
        self.library = self._open_library(config)
        self._cache: AdapterCache[Layout, LoadedAdapter] = AdapterCache(plan.host_pages, plan.device_pages)
        self._transfers = Transfers(self._cache, self._pool, slicer, others)
        most = max(LEAST_LOADED_BYTES, plan.host_pages * self._pool.page_bytes)
        self.loader = AdapterLoader(self.library, parts.rules, self._cache, most)
        self.prepare, self.make_ready = self.loader.prepare, self._transfers.make_ready
        self._waiting: dict[str, set[AdapterLease]] = {}  # by digests of adapters on the host
        self._pins: dict[int, AdapterLease] = {}  # by task id
        self._largest = parts.largest_pages  # of any adapter so far: as much must remain beside pins
        self._mixes = Mixes()
        self._residents: tuple[tuple[int, ...], tuple[Resident, ...]] = ((), ())  # state of the cache, list
        if config.prefetch_dir is not None:
            self._prefetch(config.prefetch_dir)

    def reader(
        self, modules: Mapping[int, LoraModule], roots: Sequence[Path] | None = None, *, narrow: bool = True
    ) -> AdapterReader:
        """Reads files for this store. modules: in the order of the files. roots: as in `Bounds`. narrow: rows
        may be narrowed to the pages' dtype.
        """
        options, pages = self._parts.options, self._pool.dtype_name
        options = replace(
            options,
            modules=modules,
            bounds=options.bounds.within(roots),
            bfloat16=narrow and pages == "bfloat16",
            layouts=KnownLayouts(),
        )
        return AdapterReader(self.rules, options, pages if self._slicer is None else "")

    def stats(self) -> AdapterStats:
        host, device, library = self._cache.host, self._cache.device, self.library
        state = (
            *(host.num_stores, host.num_evictions),
            *(self._transfers.num_loads, device.num_evictions, library.num_binds),
            *self._pins,
        )
        if state != self._residents[0]:
            found = []
            for task_id, digest in library.bound():
                if (entry := host.entries.get(digest)) is not None:
                    pages, loaded, rank = len(entry.pages), digest in device.entries, entry.content.rank
                    name, pinned = library.name_of(task_id), task_id in self._pins
                    found.append(Resident(name, pages, loaded, rank, pinned))
            self._residents = (state, tuple(found))
        return AdapterStats(
            host_pages=host.pages.num_pages,
            host_pages_free=host.pages.num_free,
            device_pages=device.pages.num_pages,
            device_pages_free=device.pages.num_free,
            host_adapters=len(host.entries),
            device_adapters=len(device.entries),
            host_pinned=host.num_pinned,
            device_pinned=device.num_pinned,
            host_stores=host.num_stores,
            host_evictions=host.num_evictions,
            device_hits=device.num_hits,
            device_evictions=device.num_evictions,
            page_bytes=self._pool.page_bytes,
            device_loads=self._transfers.num_loads,
            version_changes=library.versions.num_changes,
            source_loads=library.num_loads,
            inert_loads=library.num_inert,
            max_device_adapters=device.pages.num_pages // self._parts.largest_pages,
            residents=self._residents[1],
        )

    def map(self) -> CacheMap:
        """The adapter on each page. The cost grows with the pages in use: call it on demand, not per step."""
        names: dict[str, list[str]] = {}
        for task_id, digest in self.library.bound():
            names.setdefault(digest, []).append(self.library.name_of(task_id))
        return self._cache.map(names)

    def resident(self, task_id: int) -> bool:
        """Whether the task's adapter is in the cache now. Thread-safe."""
        digest = self.library.digest(task_id)
        return digest is not None and self._cache.on_host(digest)

    def prepare_all(self, lora: LoraInput | LoraMix) -> tuple[Adapter | FileAdapter | None, ...]:
        """`prepare` for each member. Thread-safe."""
        return tuple(self.prepare(one) for one, _ in lora.members)

    def acquire_all(
        self, lora: LoraInput | LoraMix, adapters: Sequence[Adapter | FileAdapter | None]
    ) -> Lease:
        """A lease on the result of `prepare_all`. Like `acquire`, but also raises AdapterInvalidError for
        adapters that cannot be mixed or scaled.
        """
        if isinstance(lora, LoraInput):
            return self.acquire(lora, adapters[0])
        leases: list[AdapterLease] = []
        try:
            for (one, _), adapter in zip(lora.members, adapters, strict=True):
                leases.append(self.acquire(one, adapter))
                check_mixable(one.name or f"of task {one.task_id}", leases[-1].layout)
            check_changes(leases)
            needs = {lease.digest: lease.layout.need for lease in leases}
            if not self._cache.can_ever_hold(least_pages(needs.values())):
                pages = " + ".join(str(least_pages([one])) for one in needs.values())
                raise AdapterCacheFullError(
                    f"PEFT Cache is full. Could not store taskIds "
                    f"{', '.join(str(lease.task_id) for lease in leases)} together: they need {pages} pages, "
                    f"{self._cache.sizes}"
                )
        except BaseException:
            for lease in leases:
                self.release(lease)
            raise
        return MixLease.of([(lease, scale) for lease, (_, scale) in zip(leases, lora.members, strict=True)])

    def acquire(self, lora: LoraInput, adapter: Adapter | FileAdapter | None) -> AdapterLease:
        """A lease on the result of `prepare`. Tensors for a known id replace its adapter; existing leases
        keep theirs. Raises AdapterNotCachedError if it was evicted meanwhile, AdapterCacheFullError if it
        could never fit, AdapterInvalidError if it cannot be divided among the ranks.
        """
        assert lora.task_id is not None
        digest = adapter.digest if adapter else self.library.digest(lora.task_id)
        if digest is None:
            raise AdapterNotCachedError(lora.task_id)
        if self._cache.on_host(digest):
            layout = self._cache.host.entries[digest].content
        elif adapter is not None:
            layout = self._make_layout(adapter, lora.task_id)
        else:
            raise AdapterNotCachedError(lora.task_id)
        if adapter is not None:
            self.library.bind(lora.task_id, digest, self.loader.is_servable)
        lease = AdapterLease(digest, lora.task_id, layout, adapter)
        if self._cache.on_device(digest):
            lease.tier = "device"
            self._cache.device.entries[digest].hits += 1
            self._cache.device.num_hits += 1
        elif self._cache.on_host(digest):
            lease.tier = "host"
        else:
            lease.tier = "wire" if lora.has_tensors else "disk"
        if self._bring_to_host(lease, force=False):
            self._wait(lease)
        return lease

    def admit(self, lease: Lease) -> bool:
        """`_admit_one` for all members or none, so that two leases can never wait for each other."""
        members, device = [one for one, _ in lease.members], self._cache.device
        if len(members) > 1:  # the device must have pages for all, so that none is loaded in vain
            missing = {
                one.digest: one.layout.need for one in members if not self._cache.on_device(one.digest)
            }
            if device.victims(list(missing.values()), {one.digest for one in members}) is None:
                return False
        for count, one in enumerate(members):
            if not self._admit_one(one):
                for earlier in members[:count]:
                    self.suspend(earlier)
                return False
        return True

    def _admit_one(self, lease: AdapterLease) -> bool:
        """Start to load the adapter to the device and pin it there. False: no pages are free, which only
        adapters of admitted leases can cause: those that leases wait for are evicted, and their leases carry
        them.
        """
        digest, device = lease.digest, self._cache.device
        if digest in self._transfers.lost:
            return False
        if not self._cache.on_device(digest) and device.victims(lease.layout.need) is None:
            return False
        if not self._bring_to_host(lease, force=True):
            return False
        if not self._cache.on_device(digest):
            entry = self._cache.load(digest, NOT_LOADED)
            layout, host = lease.layout, self._cache.host.entries[digest]
            pages = self._pool.read_pages(host.pages, entry.pages)
            shared = self._pool.read_pages(host.shared, entry.shared)
            entry.content = self._pool.loaded(layout, pages, shared)
            self._transfers.load(digest)
        self._stop_waiting(lease)
        self._cache.host.pin(digest)
        device.pin(digest)
        lease.admitted = True
        return True

    def suspend(self, lease: Lease) -> None:
        """Return the lease of a preempted sequence to waiting."""
        for one, _ in lease.members:
            if one.admitted:
                self._unpin(one)
                self._wait(one)

    def release(self, lease: Lease) -> None:
        """Drop all claims. Idempotent."""
        for one, _ in lease.members:
            if one.admitted:
                self._unpin(one)
            self._stop_waiting(one)
            one.carried = None

    def is_loaded(self, lease: Lease) -> bool:
        """Whether the adapters of an admitted lease have arrived on the device."""
        return all(self._transfers.is_loaded(one.digest) for one, _ in lease.members)

    def pin(self, task_id: int) -> None:
        """Keep the adapter of a task id on both levels. Idempotent. Raises AdapterNotCachedError if it is not
        in the cache or cannot be loaded now, AdapterCacheFullError if too little space would remain for
        others.
        """
        if task_id in self._pins:
            return
        lease = self.acquire(LoraInput(task_id), None)
        try:
            pages = most_pages([lease.layout.need])
            left, needed = self._cache.unkept_pages - pages, self._largest
            held = any(one.digest == lease.digest for one in self._pins.values())
            if left < needed and not held:  # every accepted adapter must still be able to run
                raise AdapterCacheFullError(
                    f"it needs {pages} pages, which would leave {max(0, left)} of the adapter cache for all "
                    f"others, and {needed} must stay for the largest: unpin another, or make the cache larger"
                )
            if not self.admit(lease):
                raise AdapterNotCachedError(task_id)
        except BaseException:
            self.release(lease)
            raise
        self._pins[task_id] = lease
        self._count_kept()

    def unpin(self, task_id: int) -> None:
        """Allow its eviction again. No effect if it is not pinned."""
        lease = self._pins.pop(task_id, None)
        if lease is not None:
            self.release(lease)
            self._count_kept()

    def renew_pin(self, task_id: int) -> None:
        """If a task id is pinned, pin what it means now. If that does not fit beside its old content, the old
        content stays pinned instead, which is logged.
        """
        old = self._pins.pop(task_id, None)
        if old is None:
            return
        self._count_kept()
        try:
            self.pin(task_id)
        except AdapterError as error:
            logger.warning("lora task %d stays pinned in the version before: %s", task_id, error)
            self._pins[task_id] = old
            self._count_kept()
        else:
            self.release(old)

    def drop(self, digest: str) -> None:
        """Free the pages of an adapter that no name refers to any more, unless there is a lease on it."""
        entry = self._cache.host.entries.get(digest)
        if entry is not None and not entry.pins and digest not in self._waiting:
            self._cache.evict(digest)
            self._transfers.forget(digest)

    def find_lost(self, leases: Iterable[Lease]) -> Mapping[str, RequestError]:
        """Wait until the adapters of these admitted leases are on the host. Returns the ones that could not
        be read, by digest. The caller must release all their leases and then call `forget_lost`.
        """
        for lease in leases:
            for one, _ in lease.members:
                self._transfers.is_written(one.digest, wait=True)
        return self._transfers.lost

    def forget_lost(self) -> None:
        """Free the pages of adapters that could not be read. No sequence may have a lease on them."""
        for task_id, lease in list(self._pins.items()):
            if lease.digest in self._transfers.lost:
                logger.warning("lora task %d is not pinned any more: it could not be read", task_id)
                self.unpin(task_id)
        for digest in list(self._transfers.lost):
            if self._cache.on_host(digest):
                self._cache.evict(digest)
            self._transfers.forget(digest)
            self.loader.forget(digest)

    def batch(self, segments: Sequence[tuple[int, int, Lease]]) -> LoraBatch | None:
        """The adapters of one forward pass: token rows [start, stop) with their leases. The pass waits, on
        the device, for adapters that have not arrived; this call for those still being written on the host.
        """
        for _, _, lease in segments:
            for one, _ in lease.members:
                self._transfers.require(one.digest)
        entries, find = self._cache.device.entries, self._mixes.find
        loaded = [
            (start, stop, find([(entries[one.digest].content, scale) for one, scale in lease.members]))
            for start, stop, lease in segments
        ]
        return lora_batch(self._pool, loaded)

    def close(self) -> None:
        """End the writing threads. Nothing can be acquired afterwards. Idempotent."""
        self._transfers.close()
        self.library.close()

    def check(self) -> None:
        """Assert that both levels add up, and that waiting adapters are on the host or carried."""
        self._cache.check()
        for digest, leases in self._waiting.items():
            assert leases and self._cache.on_host(digest)
            assert not any(lease.admitted or lease.carried for lease in leases)

    def _open_library(self, config: LoraCacheConfig) -> AdapterLibrary:
        """The library of the folders named in the settings. Raises ConfigError."""
        on_disk = config.disk_cache_dir is not None
        disk = DiskLevel(config.disk_cache_bytes if on_disk else 0, config.disk_cache_dir)
        names = read_names(config.names_file) if config.names_file is not None else {}
        if config.catalog_dir is not None and not config.catalog_dir.is_dir():
            raise ConfigError(f"lora_catalog_dir {config.catalog_dir} is not a directory")
        reader = self.reader(self.modules, (*config.roots, *names.values()))
        return AdapterLibrary(reader, disk, AdapterFolders(names, config.catalog_dir))

    def _count_kept(self) -> None:
        needs = {lease.digest: lease.layout.need for lease in self._pins.values()}
        self._cache.kept_pages = most_pages(needs.values())

    def _make_layout(self, adapter: Adapter | FileAdapter, task_id: int) -> Layout:
        geometry, element_bytes = self._pool.geometry, self._pool.element_bytes
        if self._slicer is not None:
            layout = self._slicer.layout(adapter, geometry, element_bytes)
        else:
            rows = Layout.of(adapter.shapes(self.modules), geometry, element_bytes)
            layout = with_extras(rows, adapter.extras, geometry)
        pages = least_pages([layout.need])
        if not self._cache.can_ever_hold(pages):
            raise AdapterCacheFullError(
                f"PEFT Cache is full. Could not store taskId={task_id}: it needs {pages} pages, "
                f"{self._cache.sizes}"
            )
        self._largest = max(self._largest, pages)
        return layout

    def _wait(self, lease: AdapterLease) -> None:
        self._waiting.setdefault(lease.digest, set()).add(lease)

    def _stop_waiting(self, lease: AdapterLease) -> None:
        leases = self._waiting.get(lease.digest)
        if leases is not None:
            leases.discard(lease)
            if not leases:
                del self._waiting[lease.digest]

    def _bring_to_host(self, lease: AdapterLease, *, force: bool) -> bool:
        """Bring the adapter to the host, from the lease if it carries it. Returns False if no pages are free.

        force: also evict adapters that other leases wait for; these leases then carry them.
        """
        digest, host = lease.digest, self._cache.host
        if not self._cache.on_host(digest):
            assert lease.carried is not None
            victims = self._cache.host_victims(lease.layout.need, self._waiting, force=force)
            if victims is None:
                return False
            for victim in victims:
                if victim in self._waiting and not self._hand_back(victim):
                    return False
                self._cache.evict(victim)
                self._transfers.forget(victim)
            host.put(digest, lease.layout.need, lease.layout)
            self._transfers.write(digest, lease.carried, lease.layout)
        lease.carried = None
        return True

    def _hand_back(self, digest: str) -> bool:
        """Let the leases that wait for an adapter carry it, because it must leave the host. Returns False if
        it was lost: the leases must be told first.
        """
        self._transfers.is_written(digest, wait=True)
        if digest in self._transfers.lost:
            return False
        entry = self._cache.host.entries[digest]
        adapter = self._pool.read_host(digest, entry.content, entry.pages, entry.shared)
        if self._slicer is not None:
            adapter = AdapterPart(digest, adapter.rows, adapter.extras, num_pages=len(entry.pages))
        shared = self.loader.share(adapter)
        if self._others is not None and isinstance(shared, Adapter) and shared is adapter:
            self._others.keep(shared, entry.pages)
        for lease in self._waiting.pop(digest):
            lease.carried = shared
        return True

    def _unpin(self, lease: AdapterLease) -> None:
        self._cache.device.unpin(lease.digest)
        self._cache.host.unpin(lease.digest)
        lease.admitted = False

    def _prefetch(self, folder: Path) -> None:
        count = 0
        for task_id, adapter in self.library.prefetch(folder):
            try:
                lease = self.acquire(LoraInput(task_id), adapter)
            except AdapterError as error:  # no room, or it cannot be divided among ranks
                logger.warning("lora task %d is skipped: %s", task_id, error)
                continue
            self.release(lease)
            count += 1
        logger.info("prefetched %d adapter%s", count, "" if count == 1 else "s")
