"""Catalog: task ids to digests, digests to where their adapter can be read again."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path

from manylora.errors import (
    AdapterError,
    AdapterInvalidError,
    AdapterNotFoundError,
    ConfigError,
    printable,
)
from manylora.lora.formats.opened import is_folder
from manylora.lora.formats.sources import find_source
from manylora.lora.library.reader import AdapterReader
from manylora.lora.stored import StoredAdapter
from manylora.lora.tensors import Adapter

__all__ = ["Catalog", "task_id_of"]

logger = logging.getLogger("manylora")

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]{0,127}")
PRUNE = 4096  # task ids, of about 200 bytes each
MAX_IDS = 16384  # task ids whose adapters came with requests; of more, those bound longest ago are forgotten


class Catalog:
    """reader: of its folders. Any thread: names are resolved where requests come in, folders are read aside,
    and the engine's thread binds. Files are looked at without the lock."""

    def __init__(self, reader: AdapterReader) -> None:
        self._reader = reader
        self._lock = threading.Lock()  # of all that follows
        self._digests: dict[int, str] = {}  # bound last comes last
        self._sources: dict[str, tuple[int, Path]] = {}  # digest -> task id that names the folder, and folder
        self._prune_at = PRUNE
        self._num_binds = 0
        self._folder: Path | None = None
        self._numbers: dict[str, int] = {}  # name -> its id: -1 for the first of `_named`, and so on
        self._named: list[tuple[str, Path]] = []

    def open(self, folder: Path) -> None:
        """Serve the adapters of <folder>/<name>/ by name; each is read when it is first asked for."""
        if not folder.is_dir():
            raise ConfigError(f"lora_catalog_dir {folder} is not a directory")
        self._folder = folder

    def id_of(self, name: str, source: str | None) -> int:
        """The id that stands for a name: negative, so never one of a client's. Raises AdapterError."""
        if source not in (None, "hf", "nemo"):
            raise AdapterInvalidError(f"lora_ckpt_source must be hf or nemo, got {source[:40]!r}")
        with self._lock:
            number = self._numbers.get(name)
        # Not a path of any kind: a name of one folder.
        folder = self._folder / name if self._folder and NAME.fullmatch(name) else None
        if folder is None or (number is None and not is_folder(folder)):
            raise AdapterNotFoundError(name)
        if number is None:
            with self._lock:
                number = self._numbers.setdefault(name, -1 - len(self._named))
                if number == -1 - len(self._named):
                    self._named.append((name, folder))
        if source is not None and (source == "nemo") != (find_source(folder).kind == "nemo"):
            raise AdapterInvalidError(f"lora_name {name} is not a checkpoint of kind {source}")
        return number

    def bind(self, task_id: int, digest: str, keep: Callable[[str], bool]) -> None:
        """Point a task id at a digest. keep: whether a digest can still be served; others are forgotten in
        time, so that ids that never come back cost nothing for ever."""
        with self._lock:
            self._digests.pop(task_id, None)
            self._digests[task_id] = digest
            self._num_binds += 1
            if len(self._digests) >= self._prune_at:
                self._prune(keep)

    def _prune(self, keep: Callable[[str], bool]) -> None:
        """Forget ids whose adapters are gone; and, as any number of ids may mean one adapter, of those that
        no folder has the ones bound longest ago. Who comes with one of these again is asked for tensors."""
        sent = []
        for task_id, digest in list(self._digests.items())[:-1]:
            if digest in self._sources:
                continue
            if keep(digest):
                sent.append(task_id)
            else:
                del self._digests[task_id]
        for task_id in sent[: max(0, len(sent) - MAX_IDS // 2)] if len(sent) >= MAX_IDS else []:
            del self._digests[task_id]
        self._prune_at = len(self._digests) + PRUNE

    @property
    def num_binds(self) -> int:
        with self._lock:
            return self._num_binds

    def bound(self) -> list[tuple[int, str]]:
        """Every known id with its digest."""
        with self._lock:
            return list(self._digests.items())

    def name_of(self, task_id: int) -> str:
        """The name an id stands for, or the id as text."""
        if task_id >= 0:
            return str(task_id)
        with self._lock:
            return self._named[-1 - task_id][0]

    def digest(self, task_id: int) -> str | None:
        with self._lock:
            return self._digests.get(task_id)

    def reload(self, task_id: int) -> Adapter | StoredAdapter | None:
        """Read an evicted adapter again from its folder. None when there is none, or it cannot be read.

        A folder that changed since gives its new content to the id that it is named by, and to no other.
        """
        with self._lock:
            digest = self._digests.get(task_id)
            source = self._sources.get(digest) if digest else None
        if digest is None and task_id < 0:
            return self._read_named(task_id)
        if digest is None or source is None:
            return None
        owner, folder = source
        try:
            adapter = self._reader.read(folder).adapter
        except AdapterError as error:
            logger.warning("lora task %d cannot be read again from %s: %s", task_id, folder, error)
            return None
        if adapter.digest != digest:
            if owner != task_id:
                return None
            logger.warning("lora task %d: %s has changed; its new content is served", task_id, folder)
            with self._lock:
                self._sources.pop(digest, None)
                self._sources[adapter.digest] = (owner, folder)
        return adapter

    def prefetch(self, folder: Path) -> Iterator[tuple[int, Adapter | StoredAdapter]]:
        """The adapters of <folder>/<task id>/. A bad one is skipped with a warning that says why."""
        try:
            entries = sorted(folder.iterdir(), key=lambda path: (len(path.name), path.name))
        except OSError as error:
            logger.warning(
                "lora_prefetch_dir %s cannot be read, nothing is prefetched: %s", folder, error.strerror
            )
            return
        for entry in entries:
            if not is_folder(entry):
                continue
            name = entry.name
            if not (name.isascii() and name.isdigit() and int(name) < 2**64):
                logger.warning(
                    "lora task name %s is invalid, skipping to load lora weight from this folder.",
                    printable(name),
                )
                continue
            task_id = int(name)
            if self.digest(task_id) is not None:
                logger.warning("lora task %s is skipped: another folder has id %d already", name, task_id)
                continue
            try:
                adapter = self._reader.read(entry).adapter
            except AdapterError as error:
                logger.warning("lora task %s is skipped: %s", name, error)
                continue
            with self._lock:
                self._sources.setdefault(adapter.digest, (task_id, entry))
            yield task_id, adapter

    def _read_named(self, task_id: int) -> Adapter | StoredAdapter:
        with self._lock:
            _, folder = self._named[-1 - task_id]
        adapter = self._reader.read(folder).adapter
        with self._lock:
            self._sources.setdefault(adapter.digest, (task_id, folder))
        return adapter


def task_id_of(digest: str) -> int:
    """An id for an adapter that no client has given one. It is made of the content, so it is the same in each
    process. The highest bit keeps clear of the small numbers that clients choose."""
    return int.from_bytes(blake2b(digest.encode(), digest_size=8).digest(), "big") | 2**63
