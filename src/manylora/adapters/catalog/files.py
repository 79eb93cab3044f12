"""Adapter files: fingerprints that show a change, what below a root is an adapter, where a name is."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

from manylora.adapters.catalog.names import MAX_FOLDERS, is_folder_name, name_problem
from manylora.adapters.formats.safe_files import file_kind
from manylora.adapters.formats.sources import find_source
from manylora.errors import AdapterInvalidError, ConfigError, printable

logger = logging.getLogger("manylora")

LOOK_S = 1.0  # files that may have changed are looked at again after this time
SUFFIXES = ("", ".safetensors", ".nemo", ".gguf")  # of adapters
NO_FOLDERS: Mapping[str, Path] = MappingProxyType({})

Fingerprint = tuple[tuple[str, int, int, int, int, int], ...]
"""Per file: name, device, inode, size, and the times (ns) of the last change of its content and of its inode.
The inode's time cannot be set back.
"""
# Two writes within one tick of a file system's clock leave the same times. Times therefore identify a file's
# content only if it was last written at least this long before it was read. 2 s is the longest tick in use
# (FAT).
SETTLED_NS = 2 * 10**9
PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ESTALE, errno.ETIMEDOUT)


def is_passing(error: BaseException | None) -> bool:
    """Whether an error says nothing about the files: the machine lacks a resource or a disk."""
    return isinstance(error, OSError) and error.errno in PASSING


def is_due(looked: float) -> bool:
    """Whether to look at files again. looked: when that was done last, on the monotonic clock."""
    return time.monotonic() - looked >= LOOK_S


def fingerprint(path: Path) -> Fingerprint:
    """Fingerprint of a file, or of the files directly in a folder. Empty if there are none.

    Raises OSError if it cannot be determined now.
    """
    try:
        if path.is_dir():
            with os.scandir(path) as entries:
                files = [(entry.name, entry.stat()) for entry in entries if entry_is(entry.is_file)]
        else:
            files = [(path.name, path.stat())]
    except OSError as error:
        if is_passing(error):
            raise
        return ()
    return tuple(
        sorted((name, s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in files)
    )


def is_settled(found: Fingerprint, now_ns: int) -> bool:
    """Whether every file's last change is old enough for its times to identify its content."""
    return bool(found) and all(max(stamp[-2:]) + SETTLED_NS < now_ns for stamp in found)


def age_s(found: Fingerprint) -> float:
    """Seconds since the last change of any file's content. Infinite for times in the future."""
    age = time.time() - max((stamp[-2] for stamp in found), default=0) / 1e9
    return age if age >= 0 else float("inf")


def entry_is(test: Callable[[], bool]) -> bool:
    """`is_file` or `is_dir` of a directory entry. False for a link that leads nowhere."""
    try:
        return test()
    except OSError:
        return False


@dataclass(frozen=True)
class Found:
    path: Path
    fingerprint: Fingerprint


def find_adapters(
    root: Path,
    known: Mapping[Path, Fingerprint],
    allowed: Sequence[Path],
    bases: Sequence[str] = (),
    only_files: bool = False,
) -> dict[str, Found]:
    """Adapters by name. A name is the path below the root, without the file extension. Those that no adapter
    may have are skipped; the log says so once.

    known: the adapters of the last scan; they remain adapters even if they are broken now. allowed: resolved
    folders. A link to a folder outside of them is listed, so that reading it reports the error, but is not
    scanned. Nor is a link back to a parent folder. bases: as of `name_problem`. only_files: each adapter is
    one file, and no folder is one. Raises OSError if a scan now would miss files.
    """

    def below(folder: Path, prefix: str, depth: int) -> Iterator[tuple[str, Found]]:
        try:
            with os.scandir(folder) as entries:
                visible = sorted((e for e in entries if not e.name.startswith(".")), key=lambda e: e.name)
        except OSError as error:
            if is_passing(error):
                raise
            logger.warning("lora root: a folder cannot be read: %s", error.strerror)
            return
        for entry in visible:
            path = Path(entry.path)
            if entry_is(entry.is_dir):
                yield from at(path, prefix + entry.name, depth, link=entry.is_symlink())
            elif path.suffix in SUFFIXES[1:]:
                seen = fingerprint(path)
                if known.get(path) == seen or path.suffix == ".nemo" or _is_one(path):
                    yield prefix + path.stem, Found(path, seen)

    def at(path: Path, name: str, depth: int, *, link: bool) -> Iterator[tuple[str, Found]]:
        seen = fingerprint(path)
        depth = 0 if link and not _may_follow(path, allowed) else depth
        if only_files:
            yield from below(path, name + "/", depth - 1) if depth > 0 else ()
        elif seen and (path in known or _is_adapter(path)):
            yield name, Found(path, seen)
        elif depth > 0 and _has_more(path):
            yield from below(path, name + "/", depth - 1)
        elif seen:  # a leaf that is not an adapter: reading it reports why
            yield name, Found(path, seen)

    found = {}
    for name, one in below(root, "", MAX_FOLDERS):
        if problem := name_problem(name, bases):
            _report_skipped(name, problem)
        else:
            found[name] = one
    return found


def folders_of(adapters: Iterable[Path]) -> Iterator[Path]:
    """The real folders of these adapters' files. The hub's cache contains links to them."""
    for path in adapters:
        files = path.iterdir() if path.is_dir() else (path,)
        yield from {file.resolve().parent for file in files}


def path_below(folders: Sequence[Path], given: str) -> tuple[Path, Path] | None:
    """Resolve a path named by a client. Returns it with the first folder that contains it. None: no folder
    contains it, or it does not exist. folders: resolved.
    """
    if "\0" in given:
        return None
    for folder in folders:
        try:
            path = (folder / given).resolve()  # an absolute path is kept
            exists = path.exists()
        except (OSError, RuntimeError):
            continue
        if exists and path != folder and path.is_relative_to(folder):
            return path, folder
    return None


class AdapterFolders:
    """Where adapters are, by name or task id. Doors that read adapters at a request find them here.

    named: folders by name. catalog: each name is that of a folder in it. roots: each name is a path below
    the first one that has it, without the file extension. by_id: each task id is the name of a folder in it.
    Raises ConfigError.
    """

    def __init__(
        self,
        named: Mapping[str, Path] = NO_FOLDERS,
        catalog: Path | None = None,
        roots: Sequence[Path] = (),
        by_id: Path | None = None,
    ) -> None:
        for root in roots:
            if not root.is_dir():
                raise ConfigError(f"lora_root {root} is not a directory: give folders")
        self._named, self.catalog, self.by_id = named, catalog, by_id
        self._roots = [root.resolve() for root in roots]

    def names(self) -> set[str]:
        """Those of everything below the roots now."""
        return {name for root in self._roots for name in find_adapters(root, {}, self._roots)}

    def find(self, name: str) -> Path | None:
        """None: there is no such adapter. In the catalog and among the named ones it may not exist."""
        folder = self._named.get(name)
        if folder is None and self.catalog is not None and is_folder_name(name):
            folder = self.catalog / name
        if folder is not None or not self._roots or name_problem(name):
            return folder
        below = (path_below([root], name + suffix) for root in self._roots for suffix in SUFFIXES)
        return next((found[0] for found in below if found is not None), None)

    def name_of(self, path: str) -> str | None:
        """The name of a folder that is in the catalog, or is named. None: a client may not name it."""
        wanted = _without_dots(path)
        if self.catalog is not None and wanted.parent == _without_dots(self.catalog):
            return wanted.name
        return next((name for name, one in self._named.items() if wanted == _without_dots(one)), None)


def _may_follow(link: Path, allowed: Sequence[Path]) -> bool:
    try:
        target, here = link.resolve(), link.parent.resolve()
    except (OSError, RuntimeError):
        return False
    return not here.is_relative_to(target) and any(target.is_relative_to(one) for one in allowed)


def _without_dots(path: str | Path) -> Path:
    """Remove `..` textually only, so that a client learns nothing about links or existing files."""
    return Path(os.path.normpath(Path(path).absolute()))


@cache
def _report_skipped(name: str, problem: str) -> None:
    logger.warning("lora root: adapter %s is not served: %s", printable(name), problem)


def _is_one(path: Path) -> bool:
    return file_kind(path) in ("llgtrt", "peft", "gguf")


def _is_adapter(path: Path) -> bool:
    try:
        find_source(path)
    except AdapterInvalidError:
        return False
    return True


def _has_more(path: Path) -> bool:
    """Whether there may be adapters deeper down, in folders or as single files."""
    try:
        with os.scandir(path) as entries:
            return any(entry_is(entry.is_dir) or entry.name.endswith(SUFFIXES[1:]) for entry in entries)
    except OSError:
        return False
