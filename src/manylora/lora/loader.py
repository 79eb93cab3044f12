"""AdapterLoader: loads adapters from requests and files, up to the host level."""

from __future__ import annotations

import threading
from collections.abc import Callable
from weakref import WeakSet, WeakValueDictionary

from manylora.errors import AdapterInvalidError
from manylora.lora.file_adapter import FileAdapter
from manylora.lora.library.library import AdapterLibrary
from manylora.lora.rules import AdapterRules
from manylora.lora.tensors import Adapter
from manylora.request import LoraInput

POLL_S = 0.005


class AdapterLoader:
    """Thread-safe. on_host: whether an adapter is in the cache. max_bytes: limit on adapters that were read
    but are not on the host yet; beyond it no further adapter is read.
    """

    def __init__(
        self, library: AdapterLibrary, rules: AdapterRules, on_host: Callable[[str], bool], max_bytes: int
    ) -> None:
        self._library, self._rules, self._on_host = library, rules, on_host
        self._max_bytes = max_bytes
        self._lock = threading.Lock()  # protects the next two
        self._in_memory: WeakValueDictionary[str, Adapter | FileAdapter] = WeakValueDictionary()
        self._read: WeakSet[Adapter | FileAdapter] = WeakSet()  # those from the library
        self._closing = threading.Event()

    def prepare(self, lora: LoraInput) -> Adapter | FileAdapter | None:
        """As `AdapterStore.prepare`."""
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
        if digest is not None and self._on_host(digest):
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
            return self._on_host(digest) or digest in self._in_memory

    def wait_for_memory(self) -> None:
        """Wait while too many bytes have not reached the cache. For threads that are about to read an
        adapter. Never call it on the engine's thread, which frees that memory.
        """
        while self._count_bytes() >= self._max_bytes and not self._closing.wait(POLL_S):
            pass

    def end_waits(self) -> None:
        """Wake all waiting threads, and let no one wait any more."""
        self._closing.set()

    def _count_bytes(self) -> int:
        with self._lock:
            return sum(adapter.nbytes for adapter in self._read)
