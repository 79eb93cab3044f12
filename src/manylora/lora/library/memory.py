"""MemoryLevel: adapters that were read but not sent yet, and those that could not be read again, up to a
limit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from manylora.lora.file_adapter import FileAdapter
from manylora.lora.tensors import Adapter


class MemoryLevel:
    """Adapters by digest. Over the limit the least recently used is dropped. Those that no file holds any
    more (`orphans`) are dropped only when nothing else is left.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._adapters: OrderedDict[str, Adapter | FileAdapter] = OrderedDict()
        self.num_bytes = 0

    def __contains__(self, digest: str) -> bool:
        return digest in self._adapters

    def get(self, digest: str) -> Adapter | FileAdapter | None:
        if digest in self._adapters:
            self._adapters.move_to_end(digest)
        return self._adapters.get(digest)

    def put(self, adapter: Adapter | FileAdapter, orphans: Collection[str] = ()) -> None:
        self.drop(adapter.digest)
        self._adapters[adapter.digest] = adapter
        self.num_bytes += adapter.nbytes
        while self.num_bytes > self._max_bytes and self._adapters:
            oldest = next(iter(self._adapters))
            self.drop(next((one for one in self._adapters if one not in orphans), oldest))

    def drop(self, digest: str) -> None:
        gone = self._adapters.pop(digest, None)
        if gone is not None:
            self.num_bytes -= gone.nbytes
