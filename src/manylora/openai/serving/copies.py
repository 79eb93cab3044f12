"""Copies: where a version of an adapter is reloaded from after the engine's cache evicted it."""

from __future__ import annotations

import contextlib
from collections.abc import Set
from pathlib import Path

from manylora.errors import AdapterError
from manylora.lora.file_adapter import FileAdapter
from manylora.lora.library.disk import DiskLevel
from manylora.lora.library.memory import MemoryLevel
from manylora.lora.library.reader import AdapterReader
from manylora.lora.tensors import Adapter


class Copies:
    """Used on the event loop, except `find` and `is_needless`, which read files."""

    def __init__(self, reader: AdapterReader, memory: MemoryLevel, disk: DiskLevel) -> None:
        self._reader, self._memory, self._disk = reader, memory, disk

    def in_memory(self, digest: str) -> Adapter | FileAdapter | None:
        return self._memory.get(digest)

    def put_in_memory(self, adapter: Adapter, orphans: Set[str]) -> None:
        """orphans: digests that files no longer hold."""
        self._memory.put(adapter, set(orphans))

    def drop(self, digest: str) -> None:
        """Drop the copy in memory."""
        self._memory.drop(digest)

    def find(self, digest: str, path: Path | None) -> Adapter | FileAdapter | None:
        """From its files, if they can be read without checking their content. Otherwise from the copy on
        disk.
        """
        return self._find_stored(digest, path) or self._disk.get(digest)

    def is_needless(self, digest: str, path: Path) -> bool:
        """Whether it is in memory although its files can be read directly into the cache and a copy on disk
        survives them.
        """
        return (
            digest in self._memory and self._find_stored(digest, path) is not None and self._disk.has(digest)
        )

    def _find_stored(self, digest: str, path: Path | None) -> Adapter | FileAdapter | None:
        with contextlib.suppress(AdapterError, OSError):  # the copy may be good
            stored = None if path is None else self._reader.find_stored(path)
            if stored is not None and stored.adapter.digest == digest:
                return stored.adapter
        return None
