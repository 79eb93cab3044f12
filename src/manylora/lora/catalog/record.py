"""AdapterRecord: what requests changed in the catalog, stored in one file beside the uploaded adapters."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from manylora.lora.catalog.entry import CatalogError, Terms
from manylora.lora.catalog.files import Fingerprint

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
        """Read the file if its inode, size or time differ from the last read or write, or always if `fresh`.

        Returns whether it was read. Raises OSError, also if it is not readable: it would be unknown who owns
        the adapters.
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
            while not _try_lock(descriptor):
                if time.monotonic() > end:
                    text = "Another server is changing adapters, try again"
                    raise CatalogError("adapters_busy", text, retry_after=1)
                await asyncio.sleep(RETRY_S)
            yield
        finally:
            os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


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
