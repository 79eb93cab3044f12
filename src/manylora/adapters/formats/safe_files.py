"""Opens files of adapters: regular files only, in folders that may be read. They are read in parts of bounded
size.

Nothing is memory-mapped: if a mapped file is truncated, the process is killed.
"""

from __future__ import annotations

import json
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from manylora.adapters.bounds import ANY_MODEL, Bounds
from manylora.errors import AdapterInvalidError

# A pipe or a device in the place of a file neither holds the reader up nor becomes its terminal.
FLAGS = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
MAX_FILES = 4096
LOOKED_AT = 2**16  # bytes at the start of a file that tell its kind
EMBEDDED = "adapter_config"
"""Key of a safetensors file's metadata that has the text of adapter_config.json: such a file is an adapter of
its own."""


def is_plain(path: Path) -> bool:
    """Whether there is a regular file, or a link to one. False if that cannot be determined."""
    try:
        return path.is_file()
    except OSError:  # a link to a name that is too long, or into a folder of somebody else
        return False


def is_folder(path: Path) -> bool:
    """As `is_plain`, for folders."""
    try:
        return path.is_dir()
    except OSError:
        return False


def open_plain(path: Path, bounds: Bounds) -> int:
    """A file descriptor. Raises AdapterInvalidError if this is not a regular file or leads out of the folders
    that may be read; OSError."""
    if not stat.S_ISREG(path.stat().st_mode):  # opening a device may already do something
        raise AdapterInvalidError(f"{path.name} is not a plain file")
    descriptor = os.open(path, FLAGS)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise AdapterInvalidError(f"{path.name} is not a plain file")
        try:  # of the opened file, whatever its name leads to by now
            real = Path(f"/proc/self/fd/{descriptor}").readlink() if bounds.roots is not None else path
        except OSError:  # no such folder on this system
            real = path.resolve()
        if not bounds.allows(real):
            raise AdapterInvalidError(
                f"{path.name} is, or lies behind, a link that leads out of the folders that adapters are "
                "read from: name the folder it leads to in lora_allowed_path"
            )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class OpenFile:
    """An open file, closed when it is garbage-collected. size: in bytes, when it was opened. header: of
    safetensors, once it was read. Raises the errors of `open_plain`."""

    def __init__(self, path: Path, bounds: Bounds) -> None:
        self.name = path.name
        self.descriptor = open_plain(path, bounds)
        self.size = os.fstat(self.descriptor).st_size
        self.header = b""

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)

    def read(self, start: int, size: int) -> bytes:
        """Raises AdapterInvalidError when the file is shorter."""
        if start + size > self.size:
            raise AdapterInvalidError(f"{self.name} is not readable: it was cut short")
        target = bytearray(size)
        self.read_into(start, target)
        return bytes(target)

    def read_into(self, start: int, target: Any) -> None:
        """Fill a writable buffer. Raises AdapterInvalidError when the file is shorter."""
        view, done = memoryview(target).cast("B"), 0
        while done < len(view):
            got = os.preadv(self.descriptor, [view[done:]], start + done)
            if got == 0:
                raise AdapterInvalidError(f"{self.name} is not readable: it was cut short")
            done += got


def file_kind(path: Path, bounds: Bounds = ANY_MODEL) -> str | None:
    """What a file begins like: gguf or other gguf (a model's), nemo (any tar archive), llgtrt, or peft (the
    settings are in its metadata). None: like no adapter, or it cannot be read."""
    try:
        file = OpenFile(path, bounds)
        begin = file.read(0, min(file.size, LOOKED_AT))
    except (AdapterInvalidError, OSError):
        return None
    if begin.startswith(b"GGUF"):
        return "gguf" if b"adapter.type" in begin else "other gguf"
    if begin[257:262] == b"ustar":
        return "nemo"
    header = begin[8 : 8 + int.from_bytes(begin[:8], "little")]
    with suppress(ValueError, RecursionError):
        found = json.loads(header)
        if isinstance(found, dict) and found.keys() - {"__metadata__"} == {"weights", "config"}:
            return "llgtrt"
    return "peft" if f'"{EMBEDDED}"'.encode() in header else None


def is_gguf(path: Path, bounds: Bounds) -> bool:
    return (file_kind(path, bounds) or "").endswith("gguf")


def read_small(path: Path, bounds: Bounds, most: int) -> bytes:
    """The content of a file of at most `most` bytes. Raises AdapterInvalidError, OSError."""
    file = OpenFile(path, bounds)
    if file.size > most:
        raise AdapterInvalidError(f"{path.name} has {file.size} bytes, at most {most} are read")
    return file.read(0, file.size)


def list_files(folder: Path, suffix: str) -> list[Path]:
    """The files of a folder whose names end with `suffix`, sorted. Raises AdapterInvalidError for too many
    files, OSError."""
    found = []
    with os.scandir(folder) as entries:
        for number, entry in enumerate(entries):
            if number == MAX_FILES:
                raise AdapterInvalidError(f"folder {folder.name} holds more than {MAX_FILES} files")
            if entry.name.endswith(suffix):
                found.append(folder / entry.name)
    return sorted(found)
