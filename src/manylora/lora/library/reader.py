"""AdapterFiles: adapters read from their files, the unchanged ones without more work than that takes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from manylora.errors import AdapterChangedError, AdapterInvalidError
from manylora.kernels.loading import can_read
from manylora.lora.bounds import ANY_MODEL, Bounds
from manylora.lora.formats.base_weights import BaseWeights
from manylora.lora.formats.opened import list_files, open_plain
from manylora.lora.formats.sources import Source, find_rows, find_source, read_source, read_whole
from manylora.lora.modules import LoraModule
from manylora.lora.stored import StoredAdapter, StoredRows
from manylora.lora.tensors import Adapter, AdapterRow
from manylora.request import LoraExtra, LoraInput

__all__ = ["AdapterFiles", "Check", "CheckRows", "read_adapter_folder"]

Check = Callable[[LoraInput], Adapter]
CheckRows = Callable[[list[AdapterRow], list[LoraExtra], str | None], Adapter]
ROWS = ("peft", "nemo")  # sources whose files say how large each row is
Signature = tuple[tuple[str, int, int, int, int, int], ...]
# Two writes within one tick of a filesystem's clock leave the same times: a file is known by its times only
# when it was last written this long before it was read. 2 s are the longest tick in use (FAT).
SETTLED_NS = 2 * 10**9
KEPT = 8192  # folders whose digest is known; the one that was first read longest ago is forgotten


@dataclass
class _Known:
    """A folder's files when it was read, and the digest. stored: where its rows are, if they can be read
    straight into their pages; asked: whether that was looked for."""

    files: Signature
    digest: str
    stored: StoredRows | None = None
    asked: bool = False


class AdapterFiles:
    """check: makes an Adapter of tensors, or raises AdapterError; check_rows: of rows that a reader made, and
    their digest where it is known. modules, base: as for `read_source`. pages: their type, by torch's name;
    to bfloat16, rows may be narrowed as they are read. bounds: judged before a value is read. Any thread."""

    def __init__(
        self,
        check: Check,
        check_rows: CheckRows,
        modules: Mapping[int, LoraModule] | None = None,
        base: BaseWeights | None = None,
        pages: str = "float32",
        bounds: Bounds = ANY_MODEL,
    ) -> None:
        self._check, self._check_rows = check, check_rows
        self._modules, self._base, self._pages, self._bounds = modules, base, pages, bounds
        self._lock = threading.Lock()
        self._read_before: dict[Path, _Known] = {}

    def read(self, folder: Path, source: Source | None = None) -> Adapter | StoredAdapter:
        """source: what `find_source` found there, if it was asked. Unchanged files are not digested again,
        and where they can be are read when the pages are known. Raises AdapterInvalidError."""
        source = source or find_source(folder)
        if source.kind not in ROWS:
            weights, config = read_source(
                source, modules=self._modules, base=self._base, float8=True, bounds=self._bounds
            )
            return self._check(LoraInput(0, weights, config))
        read = partial(
            read_whole,
            source,
            modules=self._modules,
            base=self._base,
            bfloat16=self._pages == "bfloat16",
            bounds=self._bounds,
        )
        now, before = time.time_ns(), _signature(folder)
        with self._lock:
            known = self._read_before.get(folder)
        if known is not None and before == known.files:
            if not known.asked:  # by two threads at once it is found twice, and the same
                known.stored, known.asked = self._find_rows(source), True
            if known.stored is not None:
                file = folder / known.stored.file
                return StoredAdapter(
                    known.digest, known.stored, partial(_open, file, known.files, self._bounds)
                )
            rows, extras = read()
            now, before = time.time_ns(), _signature(folder)
            if before == known.files:
                return self._check_rows(rows, extras, known.digest)
            del rows, extras  # they changed meanwhile
        adapter = self._check_rows(*read(digest=True), None)
        if _is_settled(before, now) and before == _signature(folder):
            with self._lock:
                self._read_before[folder] = _Known(before, adapter.digest)
                if len(self._read_before) > KEPT:
                    del self._read_before[next(iter(self._read_before))]
        return adapter

    def _find_rows(self, source: Source) -> StoredRows | None:
        """Of a source that was read before."""
        found = find_rows(source, self._modules, self._bounds)
        return found if found is not None and can_read(self._pages, found.dtype) else None


def read_adapter_folder(
    folder: Path, base: BaseWeights | None = None, modules: Mapping[int, LoraModule] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Weights [1, rows, W] and config [1, rows, 3 or 4] of a folder, told apart by its content."""
    return read_source(find_source(folder), modules=modules, base=base)


@contextmanager
def _open(file: Path, known: Signature, bounds: Bounds) -> Iterator[int]:
    """A descriptor. Raises AdapterChangedError when the files of its folder are not, or did not stay, what is
    known."""
    changed = AdapterChangedError(file.parent.name)
    if _signature(file.parent) != known:
        raise changed
    try:
        descriptor = open_plain(file, bounds)
    except (OSError, AdapterInvalidError):
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
        return tuple(map(_stamp, list_files(folder, "") if folder.is_dir() else [folder]))
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
