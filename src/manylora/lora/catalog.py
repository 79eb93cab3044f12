"""Catalog: task ids to digests, digests to where their adapter can be read again."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from manylora.errors import (
    AdapterChangedError,
    AdapterError,
    AdapterInvalidError,
    AdapterNotFoundError,
    ConfigError,
)
from manylora.kernels.loading import can_read
from manylora.lora.formats.base_weights import BaseWeights
from manylora.lora.formats.sources import Source, find_rows, find_source, read_source, read_whole
from manylora.lora.modules import LoraModule
from manylora.lora.stored import StoredAdapter, StoredRows
from manylora.lora.tensors import Adapter, AdapterRow
from manylora.request import LoraExtra, LoraInput

__all__ = ["Catalog", "read_adapter_folder"]

logger = logging.getLogger("manylora")

Check = Callable[[LoraInput], Adapter]
CheckRows = Callable[[list[AdapterRow], list[LoraExtra], str | None], Adapter]
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]{0,127}")
ROWS = ("peft", "nemo")  # sources whose files say how large each row is
Signature = tuple[tuple[str, int, int, int, int, int], ...]
PRUNE = 4096  # task ids, of about 200 bytes each
# Two writes within one tick of a filesystem's clock leave the same times: a file is known by its times only
# when it was last written this long before it was read. 2 s are the longest tick in use (FAT).
SETTLED_NS = 2 * 10**9


@dataclass
class _Known:
    """A folder's files when it was read, and the digest. stored: where its rows are, if they can be read
    straight into their pages; asked: whether that was looked for."""

    files: Signature
    digest: str
    stored: StoredRows | None = None
    asked: bool = False


class Catalog:
    """check: makes an Adapter of tensors, or raises AdapterError; check_rows: of rows that a reader made, and
    their digest where it is known. modules, base: as for `read_source`. pages: their type, by
    torch's name: to bfloat16, rows may be narrowed as they are read. Lookups are safe from any thread."""

    def __init__(
        self,
        check: Check,
        check_rows: CheckRows,
        modules: Mapping[int, LoraModule] | None = None,
        base: BaseWeights | None = None,
        pages: str = "float32",
    ) -> None:
        self._check, self._check_rows = check, check_rows
        self._pages = pages
        self._read_before: dict[Path, _Known] = {}
        self._modules, self._base = modules, base
        self._digests: dict[int, str] = {}
        self._sources: dict[str, tuple[int, Path]] = {}  # digest -> task id that names the folder, and folder
        self._prune_at = PRUNE
        self.num_binds = 0
        self._folder: Path | None = None
        self._named: dict[str, tuple[int, Path]] = {}

    def open(self, folder: Path) -> None:
        """Serve the adapters of <folder>/<name>/ by name; each is read when it is first asked for."""
        if not folder.is_dir():
            raise ConfigError(f"lora_catalog_dir {folder} is not a directory")
        self._folder = folder

    def id_of(self, name: str, source: str | None) -> int:
        """The id that stands for a name: negative, so never one of a client's. Raises AdapterError."""
        if source not in (None, "hf", "nemo"):
            raise AdapterInvalidError(f"lora_ckpt_source must be hf or nemo, got {source[:40]!r}")
        known = self._named.get(name)
        if known is None:
            # Not a path of any kind: a name of one folder.
            folder = self._folder / name if self._folder and NAME.fullmatch(name) else None
            if folder is None or not folder.is_dir():
                raise AdapterNotFoundError(name)
            known = self._named.setdefault(name, (-1 - len(self._named), folder))
        number, folder = known
        if source is not None and (source == "nemo") != (find_source(folder).kind == "nemo"):
            raise AdapterInvalidError(f"lora_name {name} is not a checkpoint of kind {source}")
        return number

    def bind(self, task_id: int, digest: str, keep: Callable[[str], bool]) -> None:
        """Point a task id at a digest. keep: whether a digest can still be served; others are forgotten in
        time, so that ids that never come back cost nothing for ever."""
        self._digests[task_id] = digest
        self.num_binds += 1
        if len(self._digests) >= self._prune_at:
            for other, old in list(self._digests.items()):
                if not (keep(old) or old in self._sources or other == task_id):
                    del self._digests[other]
            self._prune_at = 2 * len(self._digests) + PRUNE

    def bound(self) -> list[tuple[int, str]]:
        """Every known id with its digest."""
        return list(self._digests.items())

    def name_of(self, task_id: int) -> str:
        """The name an id stands for, or the id as text."""
        if task_id >= 0:
            return str(task_id)
        return next(name for name, (number, _) in self._named.items() if number == task_id)

    def digest(self, task_id: int) -> str | None:
        return self._digests.get(task_id)

    def reload(self, task_id: int) -> Adapter | StoredAdapter | None:
        """Read an evicted adapter again from its folder. None when there is none, or it cannot be read.

        A folder that changed since gives its new content to the id that it is named by, and to no other.
        """
        digest = self._digests.get(task_id)
        if digest is None and task_id < 0:
            return self._read_named(task_id)
        source = self._sources.get(digest) if digest else None
        if digest is None or source is None:
            return None
        owner, folder = source
        try:
            adapter = self._read(task_id, folder)
        except AdapterError as error:
            logger.warning("lora task %d cannot be read again from %s: %s", task_id, folder, error)
            return None
        if adapter.digest != digest:
            if owner != task_id:
                return None
            logger.warning("lora task %d: %s has changed; its new content is served", task_id, folder)
            del self._sources[digest]
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
            if not entry.is_dir():
                continue
            name = entry.name
            if not (name.isascii() and name.isdigit() and int(name) < 2**64):
                logger.warning(
                    "lora task name %s is invalid, skipping to load lora weight from this folder.", name
                )
                continue
            task_id = int(name)
            if task_id in self._digests:
                logger.warning("lora task %s is skipped: another folder has id %d already", name, task_id)
                continue
            try:
                adapter = self._read(task_id, entry)
            except AdapterError as error:
                logger.warning("lora task %s is skipped: %s", name, error)
                continue
            self._sources.setdefault(adapter.digest, (task_id, entry))
            yield task_id, adapter

    def _read_named(self, task_id: int) -> Adapter | StoredAdapter:
        folder = next(folder for number, folder in self._named.values() if number == task_id)
        adapter = self._read(task_id, folder)
        self._sources.setdefault(adapter.digest, (task_id, folder))
        return adapter

    def _read(self, task_id: int, folder: Path) -> Adapter | StoredAdapter:
        """Unchanged files are not digested again, and where they can be are read when the pages are known."""
        source = find_source(folder)
        if source.kind not in ROWS:
            weights, config = read_source(source, modules=self._modules, base=self._base, float8=True)
            return self._check(LoraInput(task_id, weights, config))
        read = partial(
            read_whole, source, modules=self._modules, base=self._base, bfloat16=self._pages == "bfloat16"
        )
        now, before = time.time_ns(), _signature(folder)
        known = self._read_before.get(folder)
        if known is not None and before == known.files:
            if not known.asked:
                known.stored, known.asked = self._find_rows(source), True
            if known.stored is not None:
                file = folder / known.stored.file
                return StoredAdapter(known.digest, known.stored, partial(_open, file, known.files))
            rows, extras = read()
            now, before = time.time_ns(), _signature(folder)
            if before == known.files:
                return self._check_rows(rows, extras, known.digest)
            del rows, extras  # they changed meanwhile
        adapter = self._check_rows(*read(digest=True), None)
        if _is_settled(before, now) and before == _signature(folder):
            self._read_before[folder] = _Known(before, adapter.digest)
        return adapter

    def _find_rows(self, source: Source) -> StoredRows | None:
        """Of a source that was read before."""
        found = find_rows(source, self._modules)
        return found if found is not None and can_read(self._pages, found.dtype) else None


@contextmanager
def _open(file: Path, known: Signature) -> Iterator[int]:
    """A descriptor. Raises AdapterChangedError when the files of its folder are not, or did not stay, what is
    known."""
    changed = AdapterChangedError(file.parent.name)
    if _signature(file.parent) != known:
        raise changed
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        raise changed from None
    try:
        yield descriptor
    except AdapterInvalidError:  # they were in order when they were read before
        raise changed from None
    finally:
        os.close(descriptor)
    if _signature(file.parent) != known:
        raise changed


def _signature(folder: Path) -> Signature:
    """Of the files in a folder, what changes when one of them does; the time of the last change of an inode
    cannot be set back. Raises AdapterInvalidError."""
    try:
        return tuple(map(_stamp, sorted(folder.iterdir()) if folder.is_dir() else [folder]))
    except OSError as error:
        raise AdapterInvalidError(f"folder {folder.name} cannot be read: {error.strerror}") from error


def _is_settled(signature: Signature, now: int) -> bool:
    return all(max(stamp[-2:]) + SETTLED_NS < now for stamp in signature)


def _stamp(path: Path) -> tuple[str, int, int, int, int, int]:
    """Zeros for a link to nowhere, and for a file that went away while the folder was listed."""
    try:
        s = path.stat()
    except OSError:
        return path.name, 0, 0, 0, 0, 0
    return path.name, s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns


def read_adapter_folder(
    folder: Path, base: BaseWeights | None = None, modules: Mapping[int, LoraModule] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Weights [1, rows, W] and config [1, rows, 3 or 4] of a folder, told apart by its content."""
    return read_source(find_source(folder), modules=modules, base=base)
