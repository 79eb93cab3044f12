"""Uploads: adapters sent as request bodies, stored as files in one folder, up to a limit. AdapterRecord: what
requests changed in the catalog, stored in one file beside them.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from manylora.adapters.catalog.entry import CatalogError, Terms
from manylora.adapters.catalog.files import Fingerprint
from manylora.adapters.formats.safe_files import EMBEDDED
from manylora.adapters.formats.tensor_files import with_metadata
from manylora.system.folders import make_temporary, remove_temporary

logger = logging.getLogger("manylora")

INCOMING = ".incoming"  # a hidden folder, which scans of the adapter roots skip
ABANDONED_S = 3600.0  # after this time an upload to another server counts as abandoned
FILE, LOCK = ".terms.json", ".lock"
SUFFIX = ".safetensors"
MAX_NAMES = 2**14
MAX_BYTES = 2**25
LOCK_S, RETRY_S = 60.0, 0.02  # another server may be reading a large adapter
READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
Kind = Literal["sent", "path", "alias", "found", "gone"]
Stamp = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class Kept:
    """What a request made a name mean.

    kind: an uploaded adapter, one at a path, an alias, one found in a root but on other terms, or gone.
    target: the path, or what an alias stands for. version, digest: of what was loaded; other servers with the
    same record count on from there. stamp: of files in a root, which are hidden until these change.
    """

    kind: Kind
    terms: Terms = field(default_factory=Terms)
    target: str = ""
    version: int = 0
    digest: str = ""
    stamp: Stamp = ()

    def values(self) -> dict[str, Any]:
        """As JSON values, without defaults."""
        terms = {name: value for name, value in vars(self.terms).items() if value != getattr(Terms, name)}
        own = {"target": self.target, "version": self.version, "digest": self.digest, "stamp": self.stamp}
        return {"kind": self.kind, "terms": terms} | {name: value for name, value in own.items() if value}

    @classmethod
    def of(cls, values: dict[str, Any]) -> Kept:
        """Raises TypeError, ValueError."""
        found = cls(**{**values, "terms": Terms(**values["terms"])})
        if found.kind not in get_args(Kind):
            raise ValueError(found.kind)
        return replace(found, stamp=tuple((str(n), int(size), int(at)) for n, size, at in found.stamp))


def stamp_of(found: Fingerprint) -> Stamp:
    """The part of a fingerprint that is equal on every host: each file's name, size and time."""
    return tuple((name, size, changed) for name, _, _, size, changed, _ in found)


class AdapterRecord:
    """Several servers may share the folder. Changes are then made within `locked`, after `read`.

    names: what each name means; change it with `set`. revision: grows with each change.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: tuple[int, int, int] | None = None
        self.names: dict[str, Kept] = {}
        self.revision = 0

    def read(self, *, fresh: bool = False) -> bool:
        """Read the file if its inode, size or time differ from the last read or write, or if `fresh`. Returns
        whether it was read. Raises OSError if it is not readable: its adapters' owners would be unknown.
        """
        path = self._folder / FILE
        try:
            seen = _identity(path)
        except FileNotFoundError:
            return False
        if seen == self._seen and not fresh:
            return False
        if path.stat().st_size > MAX_BYTES:
            raise OSError(errno.EFBIG, f"{FILE} has more than {MAX_BYTES} bytes")
        try:
            found = json.loads(path.read_text())
            revision = found.get("revision")
            if isinstance(revision, int):
                names = {str(name): Kept.of(one) for name, one in found["adapters"].items()}
            else:  # an older file, with the terms of uploaded adapters
                revision = 0
                names = {str(name): Kept("sent", Terms(**one)) for name, one in found.items()}
        except (ValueError, TypeError, AttributeError, KeyError):
            text = f"{FILE} is not readable, and says whose these adapters are"
            raise OSError(errno.EINVAL, text) from None
        self._seen, self.names, self.revision = seen, names, revision
        return True

    def set(self, name: str, kept: Kept | None) -> None:
        """None: remove the record of the name. Raises OSError; nothing has changed then."""
        if self.names.get(name) == kept:
            return
        names = {one: held for one, held in self.names.items() if one != name}
        if kept is not None:
            names[name] = replace(kept, terms=replace(kept.terms))
        while len(names) > MAX_NAMES:
            gone = next((one for one, held in names.items() if held.kind == "gone" and one != name), None)
            if gone is None:
                raise OSError(errno.ENOSPC, f"{MAX_NAMES} adapters are there already")
            del names[gone]
        values = {one: held.values() for one, held in names.items()}
        part, path = self._folder / f"{FILE}.part", self._folder / FILE
        part.write_text(json.dumps({"revision": self.revision + 1, "adapters": values}))
        part.replace(path)
        self._seen, self.names, self.revision = _identity(path), names, self.revision + 1

    @contextlib.asynccontextmanager
    async def locked(self) -> AsyncIterator[None]:
        """Hold the lock against other servers; it ends with its process. Raises CatalogError."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise unwritable(error) from error
        try:
            end = time.monotonic() + LOCK_S
            while True:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                if time.monotonic() > end:
                    text = "Another server is changing adapters, try again"
                    raise CatalogError("adapters_busy", text, retry_after=1)
                await asyncio.sleep(RETRY_S)
            yield
        finally:
            os.close(descriptor)


def sent_file(folder: Path, name: str) -> Path:
    """The path where an uploaded adapter is stored."""
    return folder / f"{name}{SUFFIX}"


def unwritable(error: OSError) -> CatalogError:
    """The client's error if the folder cannot store its adapter."""
    if error.errno in READ_ONLY:
        text = "The folder of --lora-upload-dir is read-only here, so requests cannot change adapters"
        return CatalogError("not_allowed", text)
    return CatalogError("storage_full", "The server cannot store adapters at the moment")


def _identity(path: Path) -> tuple[int, int, int]:
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


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
        """Make a received file with PEFT's tensors an adapter of its own, with the text of an
        adapter_config.json. Returns its path; the given file is removed. Raises CatalogError,
        AdapterInvalidError.
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
        assert self.folder is not None
        target = sent_file(self.folder, name)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            older = target.stat().st_size if target.exists() else 0
            if self.shared:  # other servers may have received some, too
                self.num_bytes = _size_of(self.folder, placed=True)
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
            self.drop(sent_file(self.folder, name))
            self.keep_terms(name, Terms())

    def keep_terms(self, name: str, terms: Terms) -> None:
        """Make the terms of an uploaded adapter persist. A disk that cannot store them is logged."""
        if self.folder is None or self.shared:
            return
        if name in self._record.names or sent_file(self.folder, name).exists():
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
