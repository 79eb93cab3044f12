"""AdapterStore: the engine's leases on adapters, and the two cache levels that serve them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from manylora.config.engine import LoraCacheConfig, ModelConfig
from manylora.errors import (
    AdapterCacheFullError,
    AdapterNotCachedError,
    RequestError,
)
from manylora.kernels.spec import LoraBatch
from manylora.lora.arrivals import Arrivals
from manylora.lora.cache import AdapterCache
from manylora.lora.cache_view import CacheView
from manylora.lora.extras import num_virtual, with_extras
from manylora.lora.file_adapter import FileAdapter
from manylora.lora.formats.base_weights import BaseWeights
from manylora.lora.geometry import Layout
from manylora.lora.library.library import AdapterLibrary
from manylora.lora.loaded import LoadedAdapter, OtherRanks, lora_batch
from manylora.lora.loader import AdapterLoader
from manylora.lora.modules import LoraModule
from manylora.lora.pins import Pins
from manylora.lora.slicing import AdapterPart, Slicer
from manylora.lora.store_parts import StoreParts, build_parts
from manylora.lora.tensors import Adapter
from manylora.request import LoraInput
from manylora.stats import AdapterStats

logger = logging.getLogger("manylora")

LEAST_LOADED_BYTES = 2**30  # of adapters on their way to the cache, however small that is


@dataclass(eq=False)
class AdapterLease:
    """One sequence's claim on one adapter.

    Until it is admitted the adapter is on the host, or, while no pages are free for it, carried here.
    Admitted, it is pinned on both levels.
    """

    digest: str
    task_id: int
    layout: Layout
    carried: Adapter | FileAdapter | None = None
    admitted: bool = False
    tier: str = ""  # where the adapter was found: device, host, disk (its source), wire (sent along)

    @property
    def num_virtual(self) -> int:
        """Virtual tokens that the adapter puts before each prompt."""
        return num_virtual(self.layout)


class AdapterStore:
    """Methods belong to the engine's thread, except where they say so."""

    def __init__(
        self,
        parts: StoreParts,
        library: AdapterLibrary,
        slicer: Slicer | None = None,
        others: OtherRanks | None = None,
    ) -> None:
        self.parts, self.library, self._slicer, self._others = parts, library, slicer, others
        self.rules = parts.rules
        plan, self._pool = parts.plan, parts.pool
        self._geometry = plan.geometry
        self._cache = AdapterCache(plan.host_pages, plan.device_pages)
        self._arrivals = Arrivals(self._cache, self._pool, slicer, others)
        most = max(LEAST_LOADED_BYTES, plan.host_pages * self._pool.page_bytes)
        self.loader = AdapterLoader(library, parts.rules, self._cache.on_host, most)
        self._waiting: dict[str, set[AdapterLease]] = {}  # on the host for leases that are not admitted
        self._largest = parts.largest_pages  # of all adapters so far
        self.pins = Pins(
            self._cache,
            lambda task_id: self.acquire(LoraInput(task_id), None),
            self.admit,
            self.release,
            lambda: self._largest,
        )
        self.view = CacheView(
            self._cache, library, self._arrivals, self._pool.page_bytes, parts.max_device_adapters
        )

    @classmethod
    def open(
        cls,
        model: ModelConfig,
        config: LoraCacheConfig,
        device: torch.device,
        dtype: torch.dtype,
        free_bytes: int,
        base: BaseWeights | None = None,
        slicer: Slicer | None = None,
        others: OtherRanks | None = None,
    ) -> AdapterStore:
        """Size the levels, allocate them, and prefetch. Raises ConfigError.

        dtype: of the pages.
        free_bytes: of the device, after weights and KV cache; the device level takes its fraction of these.
        slicer: takes this rank's part of adapters of the whole model, where several ranks share them.
        base: what the DoRA magnitudes of PEFT directories are normalised with; None refuses such adapters.
        others: those ranks, which do the same with their parts.
        """
        parts = build_parts(model, config, device, dtype, free_bytes, base, slicer)
        store = cls(parts, parts.library(config), slicer, others)
        if config.prefetch_dir is not None:
            store._prefetch(config.prefetch_dir)
        return store

    @property
    def modules(self) -> Mapping[int, LoraModule]:
        """Those that adapters may have, by id."""
        return self.rules.modules

    def stats(self) -> AdapterStats:
        return self.view.stats()

    def name_of(self, task_id: int) -> str:
        """How metrics call an adapter."""
        return self.library.name_of(task_id)

    def resident(self, task_id: int) -> bool:
        """Whether the task's adapter is in the cache now. Any thread."""
        digest = self.library.digest(task_id)
        return digest is not None and self._cache.on_host(digest)

    def prepare(self, lora: LoraInput) -> Adapter | FileAdapter | None:
        """Check tensors, or find an adapter that is not on the host; None when it is. Any thread.

        Raises AdapterInvalidError, AdapterNotCachedError.
        """
        return self.loader.prepare(lora)

    def acquire(self, lora: LoraInput, adapter: Adapter | FileAdapter | None) -> AdapterLease:
        """A lease on what `prepare` returned. On the host, or carried until pages are free.

        Tensors for a known id replace it; leases in flight keep what they have. Raises AdapterNotCachedError
        when it was evicted meanwhile, AdapterCacheFullError when it could never fit.
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
        lease = AdapterLease(digest, lora.task_id, layout, adapter, tier=self._tier(digest, lora))
        if lease.tier == "device":
            self._cache.device.count_hit(digest)
        if self._bring_to_host(lease, force=False):
            self._waiting.setdefault(digest, set()).add(lease)
        return lease

    def admit(self, lease: AdapterLease) -> bool:
        """Begin to bring the adapter to the device and pin it there; False when no pages are free for it.

        Only adapters of admitted leases can prevent it: where adapters that other leases wait for fill the
        host, these are evicted, and their leases carry them.
        """
        digest, device = lease.digest, self._cache.device
        if digest in self._arrivals.lost:
            return False
        if not self._cache.on_device(digest) and device.victims(lease.layout.num_pages) is None:
            return False
        if not self._bring_to_host(lease, force=True):
            return False
        if not self._cache.on_device(digest):
            entry = self._cache.load(digest, {})
            layout, host = lease.layout, self._cache.host.entries[digest]
            pages = self._pool.read_pages(host.pages, entry.pages)
            entry.content = LoadedAdapter.at(self._pool, layout, pages)
            self._arrivals.load(digest)
        self._stop_waiting(lease)
        self._cache.host.pin(digest)
        device.pin(digest)
        lease.admitted = True
        return True

    def suspend(self, lease: AdapterLease) -> None:
        """Let a preempted sequence wait again."""
        if lease.admitted:
            self._unpin(lease)
            self._waiting.setdefault(lease.digest, set()).add(lease)

    def release(self, lease: AdapterLease) -> None:
        """Drop everything; calling it twice does no harm."""
        if lease.admitted:
            self._unpin(lease)
        self._stop_waiting(lease)
        lease.carried = None

    def is_loaded(self, lease: AdapterLease) -> bool:
        """Whether an admitted lease's adapter has arrived on the device."""
        return self._arrivals.is_loaded(lease.digest)

    def find_lost(self, leases: Iterable[AdapterLease]) -> Mapping[str, RequestError]:
        """Wait until the adapters of these admitted leases are on the host. Returns those that could not be
        read, by digest: all their leases are to be released, and then `forget_lost` called."""
        for lease in leases:
            self._arrivals.is_written(lease.digest, wait=True)
        return self._arrivals.lost

    def forget_lost(self) -> None:
        """Free the pages of adapters that could not be read. No sequence's lease may be left on them."""
        self.pins.drop(self._arrivals.lost)
        for digest in list(self._arrivals.lost):
            if self._cache.on_host(digest):
                self._cache.evict(digest)
            self._arrivals.forget(digest)
            self.loader.forget(digest)

    def batch(self, segments: Sequence[tuple[int, int, AdapterLease]]) -> LoraBatch | None:
        """The adapters of one forward pass: token rows [start, stop) and the lease they run under.

        The pass will wait, on the device, for those that have not arrived; this call for those that are still
        written on the host.
        """
        for _, _, lease in segments:
            self._arrivals.require(lease.digest)
        entries = self._cache.device.entries
        loaded = ((start, stop, entries[lease.digest].content) for start, stop, lease in segments)
        return lora_batch(self._pool, loaded)

    def close(self) -> None:
        """End the threads that write; nothing can be acquired any more. Idempotent."""
        self._arrivals.close()
        self.library.close()

    def check(self) -> None:
        """Assert that both levels add up, and that what is waited for is here or carried."""
        self._cache.check()
        for digest, leases in self._waiting.items():
            assert self._cache.on_host(digest)
            assert leases
            assert not any(lease.admitted or lease.carried for lease in leases)

    def _tier(self, digest: str, lora: LoraInput) -> str:
        if self._cache.on_device(digest):
            return "device"
        if self._cache.on_host(digest):
            return "host"
        return "wire" if lora.has_tensors else "disk"

    def _make_layout(self, adapter: Adapter | FileAdapter, task_id: int) -> Layout:
        sizes = self._geometry, self._pool.element_bytes
        if self._slicer is not None:
            layout = self._slicer.layout(adapter, *sizes)
        else:
            layout = with_extras(
                Layout.of(adapter.shapes(self.modules), *sizes), adapter.extras, self._geometry
            )
        if not self._cache.can_ever_hold(layout.num_pages):
            host, device = self._cache.host.pages.num_pages, self._cache.device.pages.num_pages
            raise AdapterCacheFullError(
                f"PEFT Cache is full. Could not store taskId={task_id}: it needs {layout.num_pages} pages, "
                f"the host level has {host} and the device level {device}"
                + (f", of which pinned adapters have {self._cache.kept_pages}" * bool(self._cache.kept_pages))
            )
        self._largest = max(self._largest, layout.num_pages)
        return layout

    def _bring_to_host(self, lease: AdapterLease, *, force: bool) -> bool:
        """Have the adapter on the host, storing it first if the lease carries it; False: no free pages."""
        if not self._cache.on_host(lease.digest):
            assert lease.carried is not None
            layout = lease.layout
            victims = self._cache.host_victims(layout.num_pages, self._waiting, force=force)
            if victims is None:
                return False
            for victim in victims:
                if not self._return_to_waiting(victim):
                    return False
                self._cache.evict(victim)
                self._arrivals.forget(victim)
            entry = self._cache.host.put(lease.digest, layout.num_pages, layout)
            self._arrivals.write(lease.digest, lease.carried, layout, entry.pages)
        lease.carried = None
        return True

    def _return_to_waiting(self, digest: str) -> bool:
        """Hand an adapter that must leave the host to the leases that wait for it. False: it was lost, and
        they are to be told first."""
        if digest in self._waiting:
            self._arrivals.is_written(digest, wait=True)
            if digest in self._arrivals.lost:
                return False
            leases = self._waiting.pop(digest)
            entry = self._cache.host.entries[digest]
            adapter = self._pool.read_host(digest, entry.content, entry.pages)
            if self._slicer is not None:
                adapter = AdapterPart(digest, adapter.rows, adapter.extras, num_pages=len(entry.pages))
            shared = self.loader.share(adapter)
            if self._others is not None and shared is adapter:
                self._others.keep(shared, entry.pages)
            for lease in leases:
                lease.carried = shared
        return True

    def _stop_waiting(self, lease: AdapterLease) -> None:
        leases = self._waiting.get(lease.digest)
        if leases is not None:
            leases.discard(lease)
            if not leases:
                del self._waiting[lease.digest]

    def _unpin(self, lease: AdapterLease) -> None:
        self._cache.device.unpin(lease.digest)
        self._cache.host.unpin(lease.digest)
        lease.admitted = False

    def _prefetch(self, folder: Path) -> None:
        count = 0
        for task_id, adapter in self.library.prefetch(folder):
            try:
                lease = self.acquire(LoraInput(task_id), adapter)
            except AdapterCacheFullError as error:
                logger.warning("lora task %d is skipped: %s", task_id, error)
                continue
            self.release(lease)
            count += 1
        logger.info("prefetched %d adapters", count)
