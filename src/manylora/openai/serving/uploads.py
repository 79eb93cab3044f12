"""Uploads: adapters that came as request bodies, stored as files in one folder, up to a limit."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import secrets
import shutil
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from pathlib import Path

from manylora.lora.formats.peft_config import EMBEDDED
from manylora.lora.formats.tensor_files import with_metadata
from manylora.openai.api.errors import ApiError
from manylora.openai.serving.adapter_entry import Terms
from manylora.system.folders import make_temporary, remove_temporary

logger = logging.getLogger("manylora")

TERMS = ".terms.json"
INCOMING = ".incoming"  # a hidden folder, which scans of the adapter roots skip
SUFFIX = ".safetensors"


class Uploads:
    """Event loop only. max_bytes: of all files together; 0: uploads are off.

    folder: None makes a temporary one that `close` removes; a given one keeps its files for the next start.
    """

    def __init__(self, max_bytes: int, folder: Path | None = None) -> None:
        self._max_bytes, self._temporary = max_bytes, folder is None
        self.folder: Path | None = None
        self._terms: dict[str, Terms] = {}  # by name
        self.num_bytes = 0
        if max_bytes:
            try:
                self.folder = self._open(folder)
            except OSError as error:  # the rest of the server works without it
                logger.warning("lora_upload_dir: no adapters in requests: %s", error.strerror)

    def _open(self, given: Path | None) -> Path:
        folder = given or make_temporary("uploads")
        shutil.rmtree(folder / INCOMING, ignore_errors=True)
        (folder / INCOMING).mkdir(parents=True, exist_ok=True)
        self._terms = _read_terms(folder / TERMS)
        self.num_bytes = sum(one.stat().st_size for one in folder.rglob(f"*{SUFFIX}"))
        return folder

    async def receive(self, stream: AsyncIterator[bytes], length: int = 0) -> Path:
        """Write a request's body to a file, for `place` or `drop`. length: the Content-Length, 0 without one.

        Raises ApiError: 403 when uploads are off, 413 over the limit, 507 when the disk is full.
        """
        if self.folder is None and self._max_bytes:
            raise _full()
        if self.folder is None:
            reason = "This server takes no adapters in requests: lora_upload_bytes is 0"
            raise ApiError(403, "not_allowed", reason)
        self._check(length)
        try:
            return await self._write(self.folder, stream)
        except OSError as error:
            logger.warning("an adapter in a request cannot be written: %s", error.strerror)
            raise _full() from error

    async def _write(self, folder: Path, stream: AsyncIterator[bytes]) -> Path:
        (folder / INCOMING).mkdir(parents=True, exist_ok=True)  # a cleanup may have removed it
        path = folder / INCOMING / f"{secrets.token_hex(8)}{SUFFIX}"
        received = 0
        try:
            with path.open("xb") as file:
                async for piece in stream:
                    self._check(len(piece))
                    received += len(piece)
                    self.num_bytes += len(piece)
                    file.write(piece)
        except BaseException:
            self.num_bytes -= received
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            raise
        return path

    def add_config(self, path: Path, config: str) -> Path:
        """Make an adapter of its own of a received file with PEFT's tensors: config is the text of its
        adapter_config.json. Returns the new path; the file is gone. Raises ApiError, AdapterInvalidError."""
        made = path.with_stem(f"{path.stem}-whole")
        try:
            with_metadata(path, made, EMBEDDED, config)
        except OSError as error:
            logger.warning("an adapter in a request cannot be written: %s", error.strerror)
            raise _full() from error
        finally:
            self.num_bytes += made.stat().st_size if made.exists() else 0
            self.drop(path)
        return made

    def place(self, path: Path, name: str, terms: Terms) -> Path:
        """Rename a received file to its adapter's name, replacing an older one. Raises ApiError 507."""
        target = self._path(name)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            older = target.stat().st_size if target.exists() else 0
            self._set_terms(name, terms)  # first: nobody else's adapter may become everyone's
            path.replace(target)
        except OSError as error:
            logger.warning("an adapter in a request cannot be kept: %s", error.strerror)
            raise _full() from error
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
            self.drop(self._path(name))
            self.keep_terms(name, Terms())

    def keep_terms(self, name: str, terms: Terms) -> None:
        """Have them hold for an uploaded adapter after a restart too. A disk that takes nothing is logged."""
        if name in self._terms or self._path(name).exists():
            try:
                self._set_terms(name, terms)
            except OSError as error:
                logger.warning("the terms of an uploaded adapter cannot be kept: %s", error.strerror)

    def terms_of(self, path: Path) -> Terms:
        """On which terms the adapter of a file is in the catalog: those it was placed on, also by an earlier
        process."""
        if self.folder is None or not path.is_relative_to(self.folder.resolve()):
            return Terms()
        name = str(path.relative_to(self.folder.resolve()).with_suffix(""))
        return replace(self._terms.get(name, Terms()))

    def close(self) -> None:
        if self._temporary and self.folder is not None:
            remove_temporary(self.folder)

    def _set_terms(self, name: str, terms: Terms) -> None:
        """Raises OSError."""
        assert self.folder is not None
        if self._terms.get(name, Terms()) == terms:
            return
        self._terms.pop(name, None)
        if terms != Terms():
            self._terms[name] = replace(terms)
        part = self.folder / f"{TERMS}.part"
        part.write_text(json.dumps({name: asdict(terms) for name, terms in self._terms.items()}))
        part.replace(self.folder / TERMS)

    def _path(self, name: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{name}{SUFFIX}"

    def _check(self, more: int) -> None:
        left = self._max_bytes - self.num_bytes
        if more > left:
            reason = f"Adapters sent in requests may have {left} more bytes: unload one that was sent"
            raise ApiError(413, "request_too_large", reason)


def _read_terms(path: Path) -> dict[str, Terms]:
    """Raises OSError. What is not in order there is left out: its adapters are then an admin's."""
    if not path.is_file():
        return {}
    try:
        return {str(name): Terms(**one) for name, one in json.loads(path.read_text()).items()}
    except (ValueError, TypeError, AttributeError):
        raise OSError(
            errno.EINVAL, f"{path.name} is not readable, and says whose these adapters are"
        ) from None


def _full() -> ApiError:
    return ApiError(507, "storage_full", "The server cannot store adapters at the moment")
