"""Uploads: adapters sent as request bodies, stored as files in one folder, up to a limit."""

from __future__ import annotations

import contextlib
import logging
import secrets
import shutil
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

from manylora.lora.catalog.entry import CatalogError, Terms
from manylora.lora.catalog.record import SUFFIX, AdapterRecord, Kept, sent_file, unwritable
from manylora.lora.formats.peft.settings import EMBEDDED
from manylora.lora.formats.tensor_files import with_metadata
from manylora.system.folders import make_temporary, remove_temporary

logger = logging.getLogger("manylora")

INCOMING = ".incoming"  # a hidden folder, which scans of the adapter roots skip
ABANDONED_S = 3600.0  # after this time an upload to another server counts as abandoned


class Uploads:
    """Event loop only. max_bytes: of all files together; 0: uploads are off.

    folder: None creates a temporary one, which `close` removes; a given one keeps its files for the next
    start. record: of a folder shared with other servers; files are placed and discarded within its lock.
    """

    def __init__(
        self, max_bytes: int, folder: Path | None = None, record: AdapterRecord | None = None
    ) -> None:
        self._max_bytes, self._given, self._temporary = max_bytes, folder, folder is None
        self.folder: Path | None = None
        self.shared = record is not None
        self.num_bytes = 0
        self._record = record or AdapterRecord(folder or Path())
        if max_bytes:
            try:
                self._open(folder or make_temporary("uploads"))
            except OSError as error:  # the server works without it
                logger.warning("lora_upload_dir: no adapters in requests: %s", error.strerror)

    def _open(self, folder: Path) -> None:
        incoming = folder / INCOMING
        if self.shared:
            with contextlib.suppress(OSError):
                for one in incoming.iterdir():
                    if time.time() - one.stat().st_mtime > ABANDONED_S:
                        one.unlink()
        else:
            shutil.rmtree(incoming, ignore_errors=True)
            incoming.mkdir(parents=True, exist_ok=True)
            self._record = AdapterRecord(folder)
            self._record.read()
            self.num_bytes = _size_of(folder)
        self.folder = folder

    @property
    def root(self) -> Path | None:
        """The folder with adapters that were uploaded, also by other servers and before uploads were off."""
        return self._given if self.shared else self.folder

    async def receive(self, stream: AsyncIterator[bytes], length: int = 0) -> Path:
        """Write a request's body to a file, for `place` or `drop`. length: the Content-Length, 0 without one.

        Raises CatalogError: uploads are off, the folder is read-only or full, or the limit is reached.
        """
        if self.folder is None and self._max_bytes:
            raise unwritable(OSError())
        if self.folder is None:
            reason = "This server takes no adapters in requests: lora_upload_bytes is 0"
            raise CatalogError("not_allowed", reason)
        if self.shared:
            self.num_bytes = _size_of(self.folder)
        self._check(length)
        incoming, received = self.folder / INCOMING, 0
        path = incoming / f"{secrets.token_hex(8)}{SUFFIX}"
        try:
            incoming.mkdir(parents=True, exist_ok=True)  # a cleanup may have removed it
            with path.open("xb") as file:
                async for piece in stream:
                    self._check(len(piece))
                    received += len(piece)
                    self.num_bytes += len(piece)
                    file.write(piece)
        except BaseException as error:
            self.num_bytes -= received
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            if isinstance(error, OSError):
                logger.warning("an adapter in a request cannot be written: %s", error.strerror)
                raise unwritable(error) from error
            raise
        return path

    def add_config(self, path: Path, config: str) -> Path:
        """Make a received file with PEFT's tensors an adapter of its own. config: text of its
        adapter_config.json.

        Returns the new path; the file is removed. Raises CatalogError, AdapterInvalidError.
        """
        made = path.with_stem(f"{path.stem}-whole")
        try:
            with_metadata(path, made, EMBEDDED, config)
        except OSError as error:
            logger.warning("an adapter in a request cannot be written: %s", error.strerror)
            raise unwritable(error) from error
        finally:
            self.num_bytes += made.stat().st_size if made.exists() else 0
            self.drop(path)
        return made

    def place(self, path: Path, name: str, kept: Kept) -> Path:
        """Rename a received file to its adapter's name, replacing an older one. Raises CatalogError."""
        target = sent_file(self._open_folder, name)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            older = target.stat().st_size if target.exists() else 0
            if self.shared:  # other servers may have received some, too
                self.num_bytes = _size_of(self._open_folder, placed=True)
                self._check(path.stat().st_size - older)
            self._keep(name, kept)  # first, so that a private adapter is never visible to all
            path.replace(target)
        except OSError as error:
            logger.warning("an adapter in a request cannot be kept: %s", error.strerror)
            raise unwritable(error) from error
        self.num_bytes -= older
        return target

    def drop(self, path: Path) -> None:
        """Delete a received file."""
        with contextlib.suppress(OSError):
            size = path.stat().st_size
            path.unlink()
            self.num_bytes -= size

    def discard(self, name: str) -> None:
        """Delete the adapter's file, if it was uploaded."""
        if self.folder is not None:
            self.drop(sent_file(self._open_folder, name))
            self.keep_terms(name, Terms())

    def keep_terms(self, name: str, terms: Terms) -> None:
        """Make the terms of an uploaded adapter persist. A disk that cannot store them is logged."""
        if not self.shared and (name in self._record.names or sent_file(self._open_folder, name).exists()):
            try:
                self._keep(name, Kept("sent", terms))
            except OSError as error:
                logger.warning("the terms of an uploaded adapter cannot be kept: %s", error.strerror)

    def terms_of(self, path: Path) -> Terms:
        """The terms of the adapter in a file: those it was placed with, perhaps by an earlier process."""
        if self.folder is None or not path.is_relative_to(self.folder.resolve()):
            return Terms()
        name = str(path.relative_to(self.folder.resolve()).with_suffix(""))
        kept = self._record.names.get(name)
        return replace(kept.terms) if kept is not None and kept.kind == "sent" else Terms()

    def close(self) -> None:
        if self._temporary and self.folder is not None:
            remove_temporary(self.folder)

    def _keep(self, name: str, kept: Kept) -> None:
        """If the folder itself is the catalog, default terms need no record. Raises OSError."""
        self._record.set(name, kept if self.shared or kept.terms != Terms() else None)

    @property
    def _open_folder(self) -> Path:
        assert self.folder is not None
        return self.folder

    def _check(self, more: int) -> None:
        left = self._max_bytes - self.num_bytes
        if more > left:
            reason = f"There are {left} bytes left for adapters sent in requests: unload one of them"
            raise CatalogError("request_too_large", reason)


def _size_of(folder: Path, *, placed: bool = False) -> int:
    """Bytes of all files. placed: without files that are being received."""
    total = 0
    for one in folder.rglob(f"*{SUFFIX}"):
        if not (placed and one.parent.name == INCOMING):
            with contextlib.suppress(FileNotFoundError):
                total += one.stat().st_size
    return total
