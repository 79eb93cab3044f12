"""AdapterStore: everything the engine asks about adapters; checks, cache, bytes, catalog under one roof."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch

from manylora.config import LoraCacheConfig, ModelConfig
from manylora.errors import AdapterCacheFullError, AdapterInvalidError, AdapterNotCachedError
from manylora.kernels.spec import LoraBatch, LoraRow, LoraSegment
from manylora.lora.cache import AdapterCache
from manylora.lora.catalog import Catalog
from manylora.lora.geometry import CacheGeometry, Placement, cache_geometry, place_rows
from manylora.lora.modules import LoraModule, lora_modules
from manylora.lora.pool import AdapterPool
from manylora.lora.tensors import Adapter, adapter_from_tensors
from manylora.request import LoraInput
from manylora.stats import AdapterStats

__all__ = ["AdapterLease", "AdapterStore"]

logger = logging.getLogger("manylora")


@dataclass(eq=False)
class AdapterLease:
    """One sequence's claim on one adapter.

    carried: the adapter itself, while the host has no room for it. The flags say which pins are held.
    """

    digest: str
    task_id: int
    carried: Adapter | None = None
    on_host: bool = False
    on_device: bool = False


@dataclass(frozen=True)
class _Layout:
    """How an adapter lies in its pages."""

    rows: tuple[tuple[Placement, bool], ...]  # with the DoRA flag
    num_pages: int


class AdapterStore:
    """Methods belong to the engine's thread, except `prepare` and `resident`."""

    def __init__(
        self,
        modules: dict[int, LoraModule],
        num_layers: int,
        rank_limit: int,
        geometry: CacheGeometry,
        cache: AdapterCache,
        pool: AdapterPool,
    ) -> None:
        self._modules = modules
        self._num_layers = num_layers
        self._rank_limit = rank_limit
        self._geometry = geometry
        self._cache = cache
        self._pool = pool
        self._catalog = Catalog(self._check)
        self._layouts: dict[str, _Layout] = {}
        self._waiting: WeakValueDictionary[str, Adapter] = WeakValueDictionary()
        self._loads: list[str] = []
        self._rows: dict[str, dict[tuple[int, int], LoraRow]] = {}  # of adapters on the device
        self._num_stores = self._num_loads = self._num_source_loads = 0

    @classmethod
    def open(
        cls,
        model: ModelConfig,
        config: LoraCacheConfig,
        device: torch.device,
        dtype: torch.dtype,
        free_bytes: int,
    ) -> AdapterStore:
        """Size the levels, allocate them, and prefetch. Raises ConfigError.

        free_bytes: of the device, after weights and KV cache; the device level takes its fraction of these.
        """
        modules = lora_modules(model, config.target_modules)
        limit = config.rank_limit
        optimal, largest = min(config.optimal_adapter_size, limit), min(config.max_adapter_size, limit)
        geometry = cache_geometry(modules.values(), model.num_layers, optimal, largest)
        size = dtype.itemsize
        device_bytes = config.gpu_memory_bytes
        if device_bytes is None:
            device_bytes = int(config.gpu_memory_fraction * free_bytes)
        host_slots = geometry.slots_for(config.host_memory_bytes, size, config.num_host_module_layer)
        device_slots = geometry.slots_for(device_bytes, size, config.num_device_module_layer)
        host_pages = geometry.pages_for("host", host_slots)
        device_pages = geometry.pages_for("device", device_slots)
        pool = AdapterPool(geometry, host_pages, device_pages, dtype, device)
        cache = AdapterCache(host_pages, device_pages)
        store = cls(modules, model.num_layers, limit, geometry, cache, pool)
        if config.prefetch_dir is not None:
            store._prefetch(config)
        return store

    def resident(self, task_id: int) -> bool:
        """Whether the task's adapter is in the cache now. Any thread."""
        digest = self._catalog.digest(task_id)
        return digest is not None and self._cache.on_host(digest)

    def prepare(self, lora: LoraInput) -> Adapter | None:
        """Check tensors, or read an evicted adapter from its source; None when it is resident. Any thread.

        Raises AdapterInvalidError, AdapterNotCachedError.
        """
        if lora.has_tensors:
            return self._check(lora)
        if lora.task_id is None:
            raise AdapterInvalidError("lora_task_id must be set for LoRA inference")
        digest = self._catalog.digest(lora.task_id)
        if digest is None:
            raise AdapterNotCachedError(lora.task_id)
        if self._cache.on_host(digest):
            return None
        waiting = self._waiting.get(digest)
        if waiting is not None:
            return waiting
        adapter = self._catalog.reload(lora.task_id)
        if adapter is None:
            raise AdapterNotCachedError(lora.task_id)
        self._num_source_loads += 1
        return adapter

    def acquire(self, lora: LoraInput, adapter: Adapter | None) -> AdapterLease:
        """A lease on what `prepare` returned. Pinned on the host, or carried until there is room.

        Tensors for a known id replace it; leases in flight keep what they have. Raises AdapterNotCachedError
        when it was evicted meanwhile, AdapterCacheFullError when it could never fit.
        """
        assert lora.task_id is not None
        digest = adapter.digest if adapter else self._catalog.digest(lora.task_id)
        if digest is None or (adapter is None and not self._cache.on_host(digest)):
            raise AdapterNotCachedError(lora.task_id)
        if adapter is not None:
            self._lay_out(adapter, lora.task_id)
            adapter = self._waiting.setdefault(digest, adapter)
            self._catalog.bind(lora.task_id, digest)
        lease = AdapterLease(digest, lora.task_id, adapter)
        self._settle(lease)
        return lease

    def admit(self, lease: AdapterLease) -> bool:
        """Bring the adapter to the device and pin it there; False when there is no room."""
        if not self._settle(lease):
            return False
        digest = lease.digest
        if not self._cache.on_device(digest):
            try:
                pages = self._cache.load(digest)
            except AdapterCacheFullError:
                return False
            self._rows[digest] = self._pool.rows(self._layouts[digest].rows, pages)
            self._loads.append(digest)
        self._cache.device.pin(digest)
        lease.on_device = True
        return True

    def suspend(self, lease: AdapterLease) -> None:
        """Drop the device pin of a preempted sequence."""
        if lease.on_device:
            self._cache.device.unpin(lease.digest)
            lease.on_device = False

    def release(self, lease: AdapterLease) -> None:
        """Drop everything; calling it twice does no harm."""
        self.suspend(lease)
        if lease.on_host:
            self._cache.host.unpin(lease.digest)
            lease.on_host = False
        lease.carried = None

    def flush_loads(self) -> None:
        """Do the host to device copies that admissions asked for. Before the forward pass that needs them."""
        for digest in self._loads:
            if self._cache.on_device(digest):
                self._pool.load(self._cache.host_pages(digest), self._cache.device_pages(digest))
                self._num_loads += 1
        self._loads.clear()

    def batch(self, segments: Sequence[tuple[int, int, AdapterLease]]) -> LoraBatch | None:
        """The adapters of one forward pass: token rows [start, stop) and the lease they run under."""
        if not segments:
            return None
        rows = self._rows
        return LoraBatch(
            self._pool.flat, tuple(LoraSegment(start, stop, rows[x.digest]) for start, stop, x in segments)
        )

    def stats(self) -> AdapterStats:
        host, device = self._cache.host, self._cache.device
        return AdapterStats(
            host_pages=host.pages.num_pages,
            host_pages_free=host.pages.num_free,
            device_pages=device.pages.num_pages,
            device_pages_free=device.pages.num_free,
            page_bytes=self._pool.page_bytes,
            host_adapters=len(host.entries),
            device_adapters=len(device.entries),
            host_pinned=sum(entry.pins > 0 for entry in host.entries.values()),
            device_pinned=sum(entry.pins > 0 for entry in device.entries.values()),
            host_stores=self._num_stores,
            host_evictions=host.num_evictions,
            device_loads=self._num_loads,
            device_evictions=device.num_evictions,
            source_loads=self._num_source_loads,
        )

    def check(self) -> None:
        """Assert that both levels add up."""
        self._cache.check()

    def _check(self, lora: LoraInput) -> Adapter:
        half = self._pool.flat.dtype == torch.float16
        return adapter_from_tensors(lora, self._modules, self._num_layers, self._rank_limit, half)

    def _lay_out(self, adapter: Adapter, task_id: int) -> None:
        if adapter.digest in self._layouts:
            return
        rows = [(self._modules[r.module_id], r.layer, r.rank, r.dora) for r in adapter.rows]
        placements, num_pages = place_rows(rows, self._geometry)
        if not self._cache.can_ever_hold(num_pages):
            host, device = self._cache.host.pages.num_pages, self._cache.device.pages.num_pages
            raise AdapterCacheFullError(
                f"PEFT Cache is full. Could not store taskId={task_id}: it needs {num_pages} pages, the host "
                f"level has {host} and the device level {device}"
            )
        flags = [row.dora for row in adapter.rows]
        self._layouts[adapter.digest] = _Layout(tuple(zip(placements, flags, strict=True)), num_pages)

    def _settle(self, lease: AdapterLease) -> bool:
        """Pin the adapter on the host, storing it first if the lease carries it; False: no room yet."""
        if lease.on_host:
            return True
        if not self._cache.on_host(lease.digest):
            assert lease.carried is not None
            layout = self._layouts[lease.digest]
            try:
                pages = self._cache.store(lease.digest, layout.num_pages)
            except AdapterCacheFullError:
                return False
            self._pool.write_host(lease.carried, [place for place, _ in layout.rows], pages)
            self._num_stores += 1
        self._cache.host.pin(lease.digest)
        lease.on_host, lease.carried = True, None
        return True

    def _prefetch(self, config: LoraCacheConfig) -> None:
        assert config.prefetch_dir is not None
        count = 0
        for task_id, adapter in self._catalog.prefetch(config.prefetch_dir):
            try:
                lease = self.acquire(LoraInput(task_id), adapter)
            except AdapterCacheFullError as error:
                logger.warning("lora task %d is skipped: %s", task_id, error)
                continue
            self.release(lease)
            count += 1
        logger.info("prefetched %d adapters", count)
