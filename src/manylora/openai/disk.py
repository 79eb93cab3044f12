"""What lies below the adapter roots: which folders and files are adapters, and whether they changed."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from manylora.errors import AdapterInvalidError
from manylora.lora.formats.llgtrt import is_llgtrt
from manylora.lora.formats.sources import find_source
from manylora.openai.names import is_name

__all__ = ["Fingerprint", "Found", "find_adapters", "fingerprint", "is_passing"]

logger = logging.getLogger("manylora")

Fingerprint = tuple[tuple[str, int, int, int], ...]
"""Name, size, time of change and inode of every file; equal as long as nobody touched one."""
MAX_DEPTH = 5
PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ESTALE, errno.ETIMEDOUT)


@dataclass(frozen=True)
class Found:
    path: Path
    fingerprint: Fingerprint


def is_passing(error: BaseException | None) -> bool:
    """Whether it says nothing of the files: the machine is short of something, or a disk is away."""
    return isinstance(error, OSError) and error.errno in PASSING


def fingerprint(path: Path) -> Fingerprint:
    """Of a file, or of the files right in a folder. Empty: there is nothing.

    Raises OSError where that cannot be told now.
    """
    try:
        if path.is_dir():
            with os.scandir(path) as entries:
                files = [(entry.name, entry.stat()) for entry in entries if entry.is_file()]
        else:
            files = [(path.name, path.stat())]
    except OSError as error:
        if is_passing(error):
            raise
        return ()
    return tuple(sorted((name, at.st_size, at.st_mtime_ns, at.st_ino) for name, at in files))


def find_adapters(root: Path, known: Mapping[Path, Fingerprint]) -> dict[str, Found]:
    """Adapters by name: the path below the root, without the ending where it is a file.

    known: what was an adapter at the last look, and is one still, however broken it may be by now.
    Raises OSError where a look now would miss what is there.
    """
    return dict(_look(root, "", known, MAX_DEPTH))


def _look(
    folder: Path, prefix: str, known: Mapping[Path, Fingerprint], depth: int
) -> Iterator[tuple[str, Found]]:
    try:
        with os.scandir(folder) as found:
            entries = sorted((e for e in found if not e.name.startswith(".")), key=lambda e: e.name)
    except OSError as error:
        if is_passing(error):
            raise
        logger.warning("lora root: a folder cannot be read: %s", error.strerror)
        return
    for entry in entries:
        path = Path(entry.path)
        if entry.is_dir():
            yield from _look_at(path, prefix + entry.name, known, depth)
        elif path.suffix in (".nemo", ".safetensors"):
            seen = fingerprint(path)
            if known.get(path) == seen or path.suffix == ".nemo" or _is_one_file(path):
                yield from _named(prefix + path.stem, Found(path, seen))


def _look_at(
    path: Path, name: str, known: Mapping[Path, Fingerprint], depth: int
) -> Iterator[tuple[str, Found]]:
    seen = fingerprint(path)
    if seen and (path in known or _is_adapter(path)):
        yield from _named(name, Found(path, seen))
    elif depth > 0 and _has_more(path):
        yield from _look(path, name + "/", known, depth - 1)
    elif seen:  # a leaf that is no adapter: reading it will say why
        yield from _named(name, Found(path, seen))


def _named(name: str, found: Found) -> Iterator[tuple[str, Found]]:
    if is_name(name):
        yield name, found


def _is_adapter(path: Path) -> bool:
    try:
        find_source(path)
    except AdapterInvalidError:
        return False
    return True


def _is_one_file(path: Path) -> bool:
    try:
        return is_llgtrt(path)
    except (AdapterInvalidError, OSError):
        return False


def _has_more(path: Path) -> bool:
    """Whether adapters may lie deeper: in folders, or as files of their own."""
    try:
        with os.scandir(path) as entries:
            return any(entry.is_dir() or entry.name.endswith((".nemo", ".safetensors")) for entry in entries)
    except OSError:
        return False
