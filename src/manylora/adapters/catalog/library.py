"""AdapterLibrary: which adapter a task id or name refers to, and where it is read again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

from manylora.adapters.catalog.files import AdapterFolders, Fingerprint, fingerprint, is_due
from manylora.adapters.catalog.levels import DiskLevel
from manylora.adapters.catalog.names import Versions
from manylora.adapters.catalog.reader import AdapterReader
from manylora.adapters.formats.safe_files import is_folder
from manylora.adapters.formats.sources import find_source
from manylora.adapters.rules import NOTHING
from manylora.adapters.tensors import Adapter, FileAdapter
from manylora.errors import (
    AdapterError,
    AdapterInvalidError,
    AdapterNotCachedError,
    AdapterNotFoundError,
    printable,
)
from manylora.request import LoraInput

logger = logging.getLogger("manylora")

Read = Callable[[], Adapter | FileAdapter]
PRUNE = 4096  # task ids, of about 200 bytes each
MAX_IDS = 16384  # task ids of adapters sent with requests; beyond it the oldest are forgotten
NOWHERE = AdapterFolders()


@dataclass
class _Source:
    """Files that a task id refers to. digest: of their content at the last read. name: of the adapter, if
    requests give it. may_be_sent: requests may also send its tensors, so unreadable files are not an error.
    """

    path: Path
    read: Read
    name: str = ""
    may_be_sent: bool = False
    digest: str | None = None
    replaced: bool = False  # the id now means tensors from a request
    files: Fingerprint = ()  # at the last check
    looked: float = 0.0


class AdapterLibrary:
    """reader: for folders named by Triton's parameters. disk: copies of adapters sent with requests. folders:
    of adapters served by name, each read at its first request. Thread-safe: names are resolved where requests
    arrive, files are read on other threads without the lock, and the engine's thread binds ids.
    """

    def __init__(
        self,
        reader: AdapterReader,
        disk: DiskLevel | None = None,
        folders: AdapterFolders = NOWHERE,
    ) -> None:
        self._reader, self._folders = reader, folders
        self._disk = disk or DiskLevel(0)
        self._lock = threading.Lock()  # protects everything below
        self._digests: dict[int, str] = {}  # in order of binding
        self._sources: dict[int, _Source] = {}  # by task id
        self._owners: dict[str, int] = {}  # digest -> the task id whose files have it
        self._names: dict[str, int] = {}  # name -> id: -1, -2 and so on
        self._prune_at = PRUNE
        self.versions = Versions()
        self.num_binds = self.num_loads = 0  # loads: adapters returned by `find`
        self.num_inert = 0  # adapters that change nothing

    def register(self, task_id: int, path: Path, read: Read) -> None:
        """Make a task id refer to files. read: returns their content, or raises AdapterError."""
        with self._lock:
            self._sources[task_id] = _Source(path, read)

    def keep(self, adapter: Adapter) -> None:
        """Copy an adapter sent with a request to the disk level. May wait for the disk."""
        self._disk.put_soon(adapter)

    def note_inert(self, name: str) -> None:
        """Count and log a loaded adapter that changes nothing. name: a task id or a name."""
        with self._lock:
            self.num_inert += 1
        logger.warning("lora task %s: %s", printable(name), NOTHING)

    def id_of(self, name: str, kind: str | None) -> int:
        """The id for a name. It is negative, so it never collides with a client's. Raises AdapterError."""
        if kind not in (None, "hf", "nemo"):
            raise AdapterInvalidError(f"lora_ckpt_source must be hf or nemo, got {kind[:40]!r}")
        with self._lock:
            number = self._names.get(name)
        folder = self._folders.find(name)
        if folder is None or (number is None and not is_folder(folder)):
            raise AdapterNotFoundError(name)
        if number is None:
            with self._lock:
                number = self._names.setdefault(name, -1 - len(self._names))
                self._sources.setdefault(number, _Source(folder, self._read_folder(folder), name))
        self._check_files(number)
        if kind is not None and (kind == "nemo") != (find_source(folder).kind == "nemo"):
            raise AdapterInvalidError(f"adapter {name[:128]!r} is not a checkpoint of kind {kind}")
        return number

    def _check_files(self, number: int) -> None:
        """If a name's files were replaced, its next request reads them. Running requests keep what they have,
        and while there are no files the last version is served."""
        source = self._sources[number]
        if source.files and not is_due(source.looked):
            return
        source.looked = time.monotonic()
        try:
            found = fingerprint(source.path)
        except OSError:  # it cannot be determined now
            return
        if not found or found == source.files:
            return
        with self._lock:
            if source.files:
                self._digests.pop(number, None)
                self._owners.pop(source.digest or "", None)
                source.digest = None
            source.files = found

    def resolve(self, lora: LoraInput) -> LoraInput:
        """The same with the name replaced by an id. Raises AdapterError."""
        if lora.name is None or lora.task_id is not None:
            return lora
        return replace(lora, task_id=self.id_of(lora.name, lora.source), source=None)

    def bind(self, task_id: int, digest: str, keep: Callable[[str], bool]) -> None:
        """Bind a task id to a digest. keep: whether a digest can still be served.

        Ids that never return must not accumulate: after a while those of other digests are forgotten, and,
        because any number of ids may refer to one adapter, the oldest that no folder has. Clients that use a
        forgotten id are asked to send tensors again.
        """
        with self._lock:
            self._digests.pop(task_id, None)
            self._digests[task_id] = digest
            self.num_binds += 1
            source = self._sources.get(task_id)
            if source is not None and source.may_be_sent:
                source.replaced = digest != source.digest
            if len(self._digests) < self._prune_at:
                return
            sent = []
            for known, digest in list(self._digests.items())[:-1]:
                if digest in self._owners:
                    continue
                if keep(digest):
                    sent.append(known)
                else:
                    del self._digests[known]
            for known in sent[: max(0, len(sent) - MAX_IDS // 2)] if len(sent) >= MAX_IDS else []:
                del self._digests[known]
            self._prune_at = len(self._digests) + PRUNE

    def bound(self) -> list[tuple[int, str]]:
        """Every known id with its digest."""
        with self._lock:
            return list(self._digests.items())

    def name_of(self, task_id: int) -> str:
        """The name an id stands for, or the id as text."""
        if task_id >= 0:
            return str(task_id)
        with self._lock:
            return self._sources[task_id].name

    def digest(self, task_id: int) -> str | None:
        with self._lock:
            return self._digests.get(task_id)

    def last_digest(self, task_id: int) -> str | None:
        """As `digest`. For an id that is not bound yet, the digest last read from its files."""
        with self._lock:
            source = self._sources.get(task_id)
            return self._digests.get(task_id) or (source.digest if source else None)

    def find(self, task_id: int) -> Adapter | FileAdapter:
        """Load an adapter that is not in the cache, from its files or else from the disk level.

        Changed files give their new content only to the id that refers to them. Raises AdapterNotCachedError
        if it is in neither place, AdapterError if the files have no usable adapter.
        """
        with self._lock:
            digest, own = self._digests.get(task_id), self._sources.get(task_id)
            source = own
            if own is None or own.replaced:  # other files with the same content
                source = self._sources.get(self._owners[digest]) if digest in self._owners else None
        found: Adapter | FileAdapter | None = None
        failure: AdapterError = AdapterNotCachedError(task_id)
        if source is not None:
            try:
                found = source.read()
            except AdapterError as error:
                if digest is None:
                    raise
                failure = failure if source.may_be_sent else error
                logger.warning("lora task %d cannot be read again from %s: %s", task_id, source.path, error)
            else:
                if source is own or found.digest == digest:
                    self._note(source, task_id, digest, found.digest)
                else:
                    found = None
        if found is None and digest is not None:
            found = self._disk.get(digest)
        if found is None:
            raise failure
        with self._lock:
            self.num_loads += 1
        return found

    def _note(self, source: _Source, task_id: int, old: str | None, new: str) -> None:
        if old not in (None, new):
            logger.warning("lora task %d: %s has changed; its new content is served", task_id, source.path)
        with self._lock:
            if source.digest != new and source.digest is not None:
                self._owners.pop(source.digest, None)
            source.digest = new
            self._owners.setdefault(new, task_id)

    def prefetch(self, folder: Path) -> Iterator[tuple[int, Adapter | FileAdapter]]:
        """The adapters in <folder>/<task id>/. A bad one is skipped with a warning that gives the reason."""
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
            source = _Source(entry, self._read_folder(entry), may_be_sent=True)
            try:
                adapter = source.read()
            except AdapterError as error:
                logger.warning("lora task %s is skipped: %s", name, error)
                continue
            with self._lock:
                self._sources[task_id] = source
            self._note(source, task_id, None, adapter.digest)
            yield task_id, adapter

    def _read_folder(self, folder: Path) -> Read:
        return lambda: self._reader.read(folder).adapter

    def close(self) -> None:
        """Write pending copies. Idempotent."""
        self._disk.close()


def task_id_of(digest: str) -> int:
    """An id for an adapter without a client's id. It is derived from the content, so it is equal in all
    processes. Its highest bit is set, to avoid the small numbers that clients choose.
    """
    return int.from_bytes(blake2b(digest.encode(), digest_size=8).digest(), "big") | 2**63
