"""Adapters on their way to the cache: read from requests and files (AdapterLoader), written to their host
pages, and copied from there to the device (Transfers).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol
from weakref import WeakSet, WeakValueDictionary

import torch

from manylora.adapters.cache.cache import AdapterCache
from manylora.adapters.cache.pool import AdapterPool, LoadedAdapter, SharedOf
from manylora.adapters.catalog.library import AdapterLibrary
from manylora.adapters.geometry import Layout
from manylora.adapters.rules import AdapterRules
from manylora.adapters.slicing import Slicer
from manylora.adapters.tensors import Adapter, FileAdapter
from manylora.errors import AdapterError, AdapterInvalidError, RequestError
from manylora.kernels.transfer import make_resident
from manylora.request import LoraInput
from manylora.system.threads import lower_priority

logger = logging.getLogger("manylora")

BRIEF_BYTES = 2**23  # adapters up to this size are written faster than a step without them would run
BRIEF_S = 0.005  # how long a step waits for such a write, once
POLL_S = 0.005  # between two looks at how much was read
StoredAdapters = AdapterCache[Layout, LoadedAdapter]

READY_BYTES = 2**23  # least amount of pages whose memory is prepared before they are written


class OtherRanks(Protocol):
    """What the other ranks of a group must do with their parts of an adapter."""

    def write(self, adapter: Adapter | FileAdapter, pages: Sequence[int]) -> None:
        """Write it to these host pages, and wait until all ranks have; an AdapterPart is one they were told
        to keep. Thread-safe. Raises RequestError.
        """

    def keep(self, part: Adapter, pages: Sequence[int]) -> None:
        """Read it back from its host pages and keep it as long as `part` exists here."""

    def load(self, digest: str, host_pages: Sequence[int], device_pages: Sequence[int]) -> None:
        """Copy it to these device pages before the next step."""


class Transfers:
    """One thread writes while steps run, because a large adapter takes longer than many steps. It writes
    adapters one after the other, so that pages given to another adapter end up with that adapter's content.

    Methods must be called on the engine's thread. lost: digests of adapters that could not be written, with
    the reason; their pages have no usable content. slicer: as in `AdapterStore`.
    """

    def __init__(
        self,
        cache: StoredAdapters,
        pool: AdapterPool,
        slicer: Slicer | None = None,
        others: OtherRanks | None = None,
    ) -> None:
        self._cache, self._pool, self._slicer, self._others = cache, pool, slicer, others
        self._writer = ThreadPoolExecutor(1, "manylora-write", lower_priority)
        self._writing: dict[str, Future[None]] = {}
        self._brief: set[str] = set()  # those of them that steps wait for
        self._to_copy: set[str] = set()  # those of them that will be copied to the device afterwards
        self._loading: dict[str, torch.Event] = {}  # being copied to the device
        self.lost: dict[str, RequestError] = {}
        self.num_loads = 0
        self._ready: list[int] = []  # pages to be claimed next
        self._unready: deque[torch.Tensor] = deque()  # parts of these that may not be backed by memory yet
        self._most_pages = 0  # largest adapter so far, in pages

    def write(self, digest: str, adapter: Adapter | FileAdapter, layout: Layout) -> None:
        """Start to write an adapter to its host pages."""
        held = self._cache.host.entries[digest]
        self._writing[digest] = self._writer.submit(self._write, adapter, layout, held.pages, held.shared)
        if len(held.pages) * self._pool.page_bytes <= BRIEF_BYTES:
            self._brief.add(digest)
        self._most_pages = max(self._most_pages, len(held.pages))

    def make_ready(self, is_idle: Callable[[], bool]) -> None:
        """Start to make the system allocate the pages to be claimed next, enough for another adapter; while
        the engine is busy, a part of them. On a virtual machine the first write to 2 MiB of new memory may
        take longer than reading an adapter, and block a core. is_idle: called on any thread.
        """
        least = -(-READY_BYTES // self._pool.page_bytes)
        pages = self._cache.host.pages.upcoming(max(self._most_pages, least))
        if pages != self._ready:
            self._ready = pages
            self._unready = deque(piece for page in pages for piece in self._pool.pieces(page))
        if self._unready:
            unready = self._unready

            def make_pieces_resident() -> None:
                while unready:
                    make_resident(unready.popleft())
                    if not is_idle():
                        return

            with suppress(RuntimeError):  # the interpreter ends: no thread starts work any more
                self._writer.submit(make_pieces_resident)

    def load(self, digest: str) -> None:
        """Start to copy an adapter to its device pages as soon as it is on the host."""
        self._loading.pop(digest, None)
        self.num_loads += 1
        if self.is_written(digest, wait=False):
            self._copy(digest)
        else:
            self._to_copy.add(digest)

    def forget(self, digest: str) -> None:
        """The adapter was evicted from the host."""
        self._writing.pop(digest, None)
        self._brief.discard(digest)
        self._to_copy.discard(digest)
        self._loading.pop(digest, None)
        self.lost.pop(digest, None)

    def is_written(self, digest: str, *, wait: bool) -> bool:
        """Whether it is on the host, or lost. Its copy to the device then starts if due."""
        writing = self._writing.get(digest)
        if writing is None:
            return True
        if not (wait or writing.done()):
            return False
        error = writing.exception()
        del self._writing[digest]
        if isinstance(error, AdapterError):
            self.lost[digest] = error
        elif error is not None:
            logger.error("an adapter could not be written into the cache", exc_info=error)
            self.lost[digest] = RequestError(f"The adapter could not be loaded: {type(error).__name__}")
        elif digest in self._to_copy and self._cache.on_device(digest):
            self._copy(digest)
        self._to_copy.discard(digest)
        return True

    def is_loaded(self, digest: str) -> bool:
        """Whether a loading adapter has arrived on the device."""
        if not self._writing and not self._loading:
            return True
        if digest in self._brief:
            self._brief.discard(digest)
            if len(self._writing) == 1 and digest in self._writing:
                futures.wait([self._writing[digest]], BRIEF_S)
        if not self.is_written(digest, wait=False):
            return False
        event = self._loading.get(digest)
        if event is not None and event.query():
            del self._loading[digest]
        return digest not in self._loading

    def require(self, digest: str) -> None:
        """Wait until it is on the host; the next pass waits, on the device, until it is there."""
        if not self._writing and not self._loading:
            return
        self.is_written(digest, wait=True)
        if digest in self._loading:
            self._pool.hold(self._loading[digest])

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._writer.shutdown(wait=True)

    def _write(
        self, adapter: Adapter | FileAdapter, layout: Layout, pages: Sequence[int], shared: SharedOf
    ) -> None:
        if self._others is not None:
            self._others.write(adapter, pages)
        held = adapter if self._slicer is None else self._slicer.slice(adapter)
        for row in held.rows if shared and isinstance(held, Adapter) else ():
            if row.shared is not None and not shared[row.shared.key].filled:
                place = shared[row.shared.key]
                self._pool.write_shared(row.shared, layout.shared[row.shared.key], place.pages)
                place.filled = True
        self._pool.write_host(held, layout, pages)

    def _copy(self, digest: str) -> None:
        host, device = self._cache.host.entries[digest], self._cache.device.entries[digest]
        if self._others is not None:
            self._others.load(digest, host.pages, device.pages)
        for key, place in device.shared.items():
            if not place.filled:  # copies are ordered, so this one is complete once the adapter's is
                self._pool.load(host.content.shared[key], host.shared[key].pages, place.pages)
                place.filled = True
        event = self._pool.load(host.content, host.pages, device.pages)
        if event is not None:
            self._loading[digest] = event


class AdapterLoader:
    """Thread-safe. max_bytes: limit on adapters that were read but are not on the host yet; beyond it no
    further adapter is read.
    """

    def __init__(
        self, library: AdapterLibrary, rules: AdapterRules, cache: StoredAdapters, max_bytes: int
    ) -> None:
        self._library, self._rules, self._cache = library, rules, cache
        self._max_bytes = max_bytes
        self._lock = threading.Lock()  # protects the next two
        self._in_memory: WeakValueDictionary[str, Adapter | FileAdapter] = WeakValueDictionary()
        self._read: WeakSet[Adapter | FileAdapter] = WeakSet()  # those from the library
        self._closing = threading.Event()

    def prepare(self, lora: LoraInput) -> Adapter | FileAdapter | None:
        """Check tensors, or find an adapter that is not on the host. None if it is.

        Raises AdapterInvalidError, AdapterNotCachedError.
        """
        if lora.has_tensors:
            made = lora.checked
            adapter = made if isinstance(made, Adapter | FileAdapter) else self._rules.check(lora)
            if isinstance(adapter, Adapter) and lora.weights is not None:
                self._library.keep(adapter)
            if isinstance(adapter, Adapter) and not adapter.acts:
                self._library.note_inert(lora.name or str(lora.task_id))
            return self.share(adapter)
        if lora.task_id is None:
            raise AdapterInvalidError("lora_task_id must be set for LoRA inference")
        digest = self._library.digest(lora.task_id)
        if digest is not None and self._cache.on_host(digest):
            return None
        with self._lock:
            loaded = self._in_memory.get(self._library.last_digest(lora.task_id) or "")
        if loaded is not None:
            return loaded
        found = self._library.find(lora.task_id)
        if isinstance(found, Adapter) and not found.acts:
            self._library.note_inert(self._library.name_of(lora.task_id))
        return self.share(found, read=True)

    def share(self, adapter: Adapter | FileAdapter, *, read: bool = False) -> Adapter | FileAdapter:
        """An adapter in memory with the same content, or else this one. read: it counts as read."""
        with self._lock:
            shared = self._in_memory.setdefault(adapter.digest, adapter)
            if read and shared is adapter:
                self._read.add(adapter)
            return shared

    def forget(self, digest: str) -> None:
        """Do not share it any more, because it cannot be written."""
        with self._lock:
            self._in_memory.pop(digest, None)

    def is_servable(self, digest: str) -> bool:
        with self._lock:
            return self._cache.on_host(digest) or digest in self._in_memory

    def wait_for_memory(self) -> None:
        """Wait while too many bytes have not reached the cache. For threads that are about to read an
        adapter. Never call it on the engine's thread, which frees that memory.
        """
        while not self._closing.is_set():
            with self._lock:
                if sum(adapter.nbytes for adapter in self._read) < self._max_bytes:
                    return
            self._closing.wait(POLL_S)

    def end_waits(self) -> None:
        """Wake all waiting threads, and let no one wait any more."""
        self._closing.set()
