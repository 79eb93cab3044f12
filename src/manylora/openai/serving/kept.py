"""KeptTensors: adapters that were read and not sent yet, and those whose files are gone; within a limit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from manylora.openai.serving.reader import ReadAdapter

__all__ = ["KeptTensors"]


class KeptTensors:
    """By digest. Over the limit the one that was used longest ago goes; those that no file holds any more
    (`orphans`) only when nothing else is left."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._found: OrderedDict[str, ReadAdapter] = OrderedDict()
        self.num_bytes = 0

    def get(self, digest: str) -> ReadAdapter | None:
        if digest in self._found:
            self._found.move_to_end(digest)
        return self._found.get(digest)

    def put(self, adapter: ReadAdapter, orphans: Collection[str] = ()) -> None:
        self.drop(adapter.digest)
        self._found[adapter.digest] = adapter
        self.num_bytes += adapter.num_bytes
        while self.num_bytes > self._max_bytes and self._found:
            self.drop(next((one for one in self._found if one not in orphans), next(iter(self._found))))

    def drop(self, digest: str) -> None:
        gone = self._found.pop(digest, None)
        if gone is not None:
            self.num_bytes -= gone.num_bytes
