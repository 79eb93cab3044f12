"""AdapterStore: everything the engine asks about adapters; checks, cache, bytes, catalog under one roof."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from weakref import WeakValueDictionary

import torch

from manylora.config.engine import LoraCacheConfig, ModelConfig
from manylora.errors import (
    AdapterCacheFullError,
    AdapterInvalidError,
    AdapterNotCachedError,
    ConfigError,
    RequestError,
)
from manylora.kernels import native
from manylora.kernels.extras import Extra, ExtraSegment
from manylora.kernels.spec import LoraBatch, LoraRow, LoraSegment
from manylora.lora.arrivals import Arrivals
from manylora.lora.bounds import Bounds
from manylora.lora.cache import AdapterCache
from manylora.lora.expert_rules import beside_experts
from manylora.lora.extras import with_extras
from manylora.lora.formats.base_weights import BaseWeights
from manylora.lora.geometry import CachePlan, Layout, plan_cache
from manylora.lora.library.library import Catalog
from manylora.lora.library.reader import AdapterReader
from manylora.lora.library.rules import AdapterRules
from manylora.lora.modules import LoraModule, lora_modules
from manylora.lora.pool import AdapterPool
from manylora.lora.stored import StoredAdapter
from manylora.lora.tensors import Adapter
from manylora.request import LoraInput
from manylora.stats import AdapterStats, CacheChange, CacheMap, MappedAdapter, Resident, Runs

__all__ = ["AdapterLease", "AdapterStore"]

logger = logging.getLogger("manylora")


@dataclass(eq=False)
class AdapterLease:
    """One sequence's claim on one adapter.

    Until it is admitted the adapter is on the host, or, while there is no room for it, carried here.
    Admitted, it is pinned on both levels.
    """

    digest: str
    task_id: int
    layout: Layout
    carried: Adapter | StoredAdapter | None = None
    admitted: bool = False
    tier: str = ""  # where the adapter was found: device, host, disk (its source), wire (sent along)


@dataclass(frozen=True)
class _Loaded:
    """An adapter on the device: where its rows lie, and its extras."""

    rows: dict[tuple[int, int], LoraRow]
    extras: dict[str, Extra]


class AdapterStore:
    """Methods belong to the engine's thread, except where they say so."""

    def __init__(
        self,
        modules: dict[int, LoraModule],
        model: ModelConfig,
        rank_limit: int,
        plan: CachePlan,
        pool: AdapterPool,
        base: BaseWeights | None = None,
        roots: Sequence[Path] = (),
    ) -> None:
        self._modules = modules
        self._geometry = plan.geometry
        self._cache = AdapterCache(plan.host_pages, plan.device_pages)
        self._pool = pool
        self._base = base
        held = min(plan.host_pages, plan.device_pages) * plan.geometry.page_elements
        self._bounds = Bounds.of(modules, model.num_layers, rank_limit, held, pool.element_bytes)
        self.rules = AdapterRules(modules, model.num_layers, rank_limit, pool.flat.dtype == torch.float16)
        self._catalog = Catalog(self.reader(modules, roots))
        self._lock = threading.Lock()  # of these two, which `prepare` changes from any thread
        # Read, or found in files, and not on the host yet.
        self._in_hand: WeakValueDictionary[str, Adapter | StoredAdapter] = WeakValueDictionary()
        self._num_source_loads = 0
        self._waiting: dict[str, set[AdapterLease]] = {}  # on the host for leases that are not admitted
        self._arrivals = Arrivals(self._cache, pool)
        self._num_stores = self._num_hits = 0
        self._max_device_adapters = plan.adapters_of_rank(modules.values(), model.num_layers, rank_limit)[1]
        self._residents: tuple[tuple[int, ...], tuple[Resident, ...]] = ((), ())  # state, and what it gave

    @classmethod
    def open(
        cls,
        model: ModelConfig,
        config: LoraCacheConfig,
        device: torch.device,
        dtype: torch.dtype,
        free_bytes: int,
        base: BaseWeights | None = None,
    ) -> AdapterStore:
        """Size the levels, allocate them, and prefetch. Raises ConfigError.

        dtype: of the pages.
        free_bytes: of the device, after weights and KV cache; the device level takes its fraction of these.
        base: what the DoRA magnitudes of PEFT directories are normalised with; None refuses such adapters.
        """
        modules = lora_modules(model, config.target_modules)
        sizes = model.num_layers, config, dtype.itemsize, free_bytes
        try:
            plan = plan_cache(modules.values(), *sizes)
        except ConfigError as error:
            if config.target_modules or model.moe is None:
                raise
            modules = beside_experts(modules)
            plan = plan_cache(modules.values(), *sizes)
            logger.warning("adapters on routed experts are off: %s", error)
        # What is on the device is on the host too: more pages there could never be used.
        plan = replace(plan, device_pages=min(plan.host_pages, plan.device_pages))
        native.load()  # not with the first adapter, which would wait for the compiler
        pool = AdapterPool(plan.geometry, plan.host_pages, plan.device_pages, dtype, device)
        store = cls(modules, model, config.rank_limit, plan, pool, base, config.roots)
        logger.info(
            "LoRA cache: host %d pages, device %d pages of %d bytes; adapters of rank %d with every module: "
            "%d on the host, %d on the device",
            plan.host_pages,
            plan.device_pages,
            pool.page_bytes,
            config.rank_limit,
            *(plan.adapters_of_rank(modules.values(), model.num_layers, config.rank_limit)),
        )
        if config.catalog_dir is not None:
            store._catalog.open(config.catalog_dir)
        if config.prefetch_dir is not None:
            store._prefetch(config.prefetch_dir)
        return store

    @property
    def modules(self) -> Mapping[int, LoraModule]:
        """Those that adapters may have, by id."""
        return self._modules

    @property
    def bounds(self) -> Bounds:
        """Of what the cache can hold."""
        return self._bounds

    def reader(
        self, modules: Mapping[int, LoraModule], roots: Sequence[Path] | None = None, narrow: bool = True
    ) -> AdapterReader:
        """Reads files for this store. modules: as they are in the files. roots: as of `Bounds`. narrow: rows
        may lose what the type of the pages does not hold."""
        pages = self._pool.dtype_name
        return AdapterReader(
            self.rules,
            modules,
            self._base,
            self._bounds.within(roots),
            pages=pages,
            narrow=narrow and pages == "bfloat16",
        )

    def resident(self, task_id: int) -> bool:
        """Whether the task's adapter is in the cache now. Any thread."""
        digest = self._catalog.digest(task_id)
        return digest is not None and self._cache.on_host(digest)

    def resolve(self, lora: LoraInput) -> LoraInput:
        """The same with an id in place of a name. Any thread. Raises AdapterError."""
        if lora.name is None or lora.task_id is not None:
            return lora
        return LoraInput(self._catalog.id_of(lora.name, lora.source), name=lora.name)

    def prepare(self, lora: LoraInput) -> Adapter | StoredAdapter | None:
        """Check tensors, or find an evicted adapter in its source; None when it is resident. Any thread.

        Raises AdapterInvalidError, AdapterNotCachedError.
        """
        if lora.has_tensors:
            made = lora.checked
            adapter = made if isinstance(made, Adapter | StoredAdapter) else self.rules.check(lora)
            return self._take_in_hand(adapter)
        if lora.task_id is None:
            raise AdapterInvalidError("lora_task_id must be set for LoRA inference")
        digest = self._catalog.digest(lora.task_id)
        if digest is None and lora.task_id >= 0:
            raise AdapterNotCachedError(lora.task_id)
        if digest is not None and self._cache.on_host(digest):
            return None
        with self._lock:
            found = self._in_hand.get(digest or "")
        if found is not None:
            return found
        again = self._catalog.reload(lora.task_id)
        if again is None:
            raise AdapterNotCachedError(lora.task_id)
        return self._take_in_hand(again, read=True)

    def acquire(self, lora: LoraInput, adapter: Adapter | StoredAdapter | None) -> AdapterLease:
        """A lease on what `prepare` returned. On the host, or carried until there is room.

        Tensors for a known id replace it; leases in flight keep what they have. Raises AdapterNotCachedError
        when it was evicted meanwhile, AdapterCacheFullError when it could never fit.
        """
        assert lora.task_id is not None
        digest = adapter.digest if adapter else self._catalog.digest(lora.task_id)
        if digest is None:
            raise AdapterNotCachedError(lora.task_id)
        if self._cache.on_host(digest):
            layout = self._cache.host.entries[digest].content
        elif adapter is not None:
            layout = self._lay_out(adapter, lora.task_id)
        else:
            raise AdapterNotCachedError(lora.task_id)
        if adapter is not None:
            self._catalog.bind(lora.task_id, digest, self._servable)
        lease = AdapterLease(digest, lora.task_id, layout, adapter, tier=self._tier(digest, lora))
        if lease.tier == "device":
            self._cache.device.entries[digest].hits += 1
            self._num_hits += 1
        if self._settle(lease, force=False):
            self._waiting.setdefault(digest, set()).add(lease)
        return lease

    def admit(self, lease: AdapterLease) -> bool:
        """Begin to bring the adapter to the device and pin it there; False when there is no room.

        Only what admitted leases hold can be in the way: where adapters that others wait for fill the host,
        those give way and are carried by who waits for them.
        """
        digest, device = lease.digest, self._cache.device
        if digest in self._arrivals.lost:
            return False
        if not self._cache.on_device(digest) and device.victims(lease.layout.num_pages) is None:
            return False
        if not self._settle(lease, force=True):
            return False
        if not self._cache.on_device(digest):
            entry = self._cache.load(digest, {})
            layout, host = lease.layout, self._cache.host.entries[digest]
            pages = self._pool.read_pages(host.pages, entry.pages)
            entry.content = _Loaded(self._pool.rows(layout, pages), self._pool.extras(layout, pages))
            self._arrivals.load(digest)
        self._forget_waiting(lease)
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
        self._forget_waiting(lease)
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
        """Free the pages of adapters that could not be read. No lease may be left on them."""
        for digest in list(self._arrivals.lost):
            if self._cache.on_host(digest):
                self._cache.evict(digest)
            self._arrivals.forget(digest)
            with self._lock:
                self._in_hand.pop(digest, None)  # or the next to ask would be given it again

    def batch(self, segments: Sequence[tuple[int, int, AdapterLease]]) -> LoraBatch | None:
        """The adapters of one forward pass: token rows [start, stop) and the lease they run under.

        The pass will wait, on the device, for those that have not arrived; this call for those that are still
        written on the host.
        """
        if not segments:
            return None
        for _, _, lease in segments:
            self._arrivals.hold(lease.digest)
        entries = self._cache.device.entries
        loaded = [(start, stop, entries[lease.digest].content) for start, stop, lease in segments]
        return LoraBatch(
            self._pool.flat,
            tuple(LoraSegment(start, stop, content.rows) for start, stop, content in loaded),
            self._pool.alignment,
            tuple(ExtraSegment(start, stop, one.extras) for start, stop, one in loaded if one.extras),
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
            device_hits=self._num_hits,
            device_loads=self._arrivals.num_loads,
            device_evictions=device.num_evictions,
            source_loads=self._num_source_loads,
            max_device_adapters=self._max_device_adapters,
            residents=self._list_residents(),
        )

    def map(self) -> CacheMap:
        """Every page's adapter. As much work as there are pages in use: for who asks, not for each step."""
        names: dict[str, list[str]] = {}
        for task_id, digest in self._catalog.bound():
            names.setdefault(digest, []).append(self._catalog.name_of(task_id))
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
        changes = tuple(
            CacheChange(c.number, c.at, c.level, c.loaded, c.digest, tuple(names.get(c.digest, ())), c.pages)
            for c in self._cache.changes
        )
        return CacheMap(host.pages.num_pages, device.pages.num_pages, tuple(adapters), changes)

    def name_of(self, task_id: int) -> str:
        """How metrics call an adapter."""
        return self._catalog.name_of(task_id)

    def _list_residents(self) -> tuple[Resident, ...]:
        """What is in the cache; made anew only when that has changed."""
        host, device = self._cache.host, self._cache.device
        state = (
            self._num_stores,
            self._catalog.num_binds,
            host.num_evictions,
            self._arrivals.num_loads,
            device.num_evictions,
        )
        if state != self._residents[0]:
            found = tuple(
                Resident(
                    self._catalog.name_of(task_id), len(host.entries[digest].pages), digest in device.entries
                )
                for task_id, digest in self._catalog.bound()
                if digest in host.entries
            )
            self._residents = (state, found)
        return self._residents[1]

    def close(self) -> None:
        """End the thread that writes; nothing can be acquired any more. Idempotent."""
        self._arrivals.close()

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

    def _servable(self, digest: str) -> bool:
        with self._lock:
            return self._cache.on_host(digest) or digest in self._in_hand

    def _take_in_hand(self, adapter: Adapter | StoredAdapter, read: bool = False) -> Adapter | StoredAdapter:
        """The adapter of this content that is in memory already, or this one. Any thread."""
        with self._lock:
            self._num_source_loads += read
            return self._in_hand.setdefault(adapter.digest, adapter)

    def _lay_out(self, adapter: Adapter | StoredAdapter, task_id: int) -> Layout:
        layout = Layout.of(adapter.shapes(self._modules), self._geometry, self._pool.element_bytes)
        layout = with_extras(layout, adapter.extras, self._geometry)
        if not self._cache.can_ever_hold(layout.num_pages):
            host, device = self._cache.host.pages.num_pages, self._cache.device.pages.num_pages
            raise AdapterCacheFullError(
                f"PEFT Cache is full. Could not store taskId={task_id}: it needs {layout.num_pages} pages, "
                f"the host level has {host} and the device level {device}"
            )
        return layout

    def _settle(self, lease: AdapterLease, *, force: bool) -> bool:
        """Have the adapter on the host, storing it first if the lease carries it; False: no room."""
        if not self._cache.on_host(lease.digest):
            assert lease.carried is not None
            layout = lease.layout
            victims = self._cache.host_victims(layout.num_pages, self._waiting, force=force)
            if victims is None:
                return False
            for victim in victims:
                if not self._give_way(victim):
                    return False
                self._cache.evict(victim)
                self._arrivals.forget(victim)
            entry = self._cache.host.put(lease.digest, layout.num_pages, layout)
            self._arrivals.write(lease.digest, lease.carried, layout, entry.pages)
            self._num_stores += 1
        lease.carried = None
        return True

    def _give_way(self, digest: str) -> bool:
        """Hand an adapter that must leave the host to the leases that wait for it. False: it was lost, and
        they are to be told first."""
        if digest in self._waiting:
            self._arrivals.is_written(digest, wait=True)
            if digest in self._arrivals.lost:
                return False
            leases = self._waiting.pop(digest)
            entry = self._cache.host.entries[digest]
            adapter = self._pool.read_host(digest, entry.content, entry.pages)
            held = self._take_in_hand(adapter)
            for lease in leases:
                lease.carried = held
        return True

    def _forget_waiting(self, lease: AdapterLease) -> None:
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
        for task_id, adapter in self._catalog.prefetch(folder):
            try:
                lease = self.acquire(LoraInput(task_id), adapter)
            except AdapterCacheFullError as error:
                logger.warning("lora task %d is skipped: %s", task_id, error)
                continue
            self.release(lease)
            count += 1
        logger.info("prefetched %d adapters", count)


def _runs(pages: Sequence[int]) -> Runs:
    runs: list[tuple[int, int]] = []
    for page in sorted(pages):
        if runs and runs[-1][1] == page:
            runs[-1] = (runs[-1][0], page + 1)
        else:
            runs.append((page, page + 1))
    return tuple(runs)
