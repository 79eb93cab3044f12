"""Unpacks the files of adapters from tar and zip archives, which may contain anything."""

from __future__ import annotations

import gzip
import io
import shutil
import stat
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from typing import IO, Any

from manylora.adapters.remote.files import MAX_FILES, SourceError, is_read, safe_path

PIECE = 2**20
MAX_MEMBERS = 2**16  # an OCI image may hold a whole system
TAIL = 2**16 + 64  # bytes at the end of a zip archive, where the size of its directory is told
MAX_DIRECTORY = 2**24


def unpack(archive: Path, folder: Path, most: int) -> int:
    """Write what `is_read` of a tar, tar.gz or zip into a folder, with its paths. Returns its bytes. most:
    bytes, of the whole unpacked archive. Raises SourceError, OSError.
    """
    left, count = most, 0
    try:
        with ExitStack() as stack:
            for path, size, source in _members(archive, most, stack):
                left, count = left - size, count + 1
                if left < 0 or count > MAX_FILES:
                    raise ValueError(f"it has more than {most} bytes or {MAX_FILES} files of an adapter")
                target = folder / path
                target.parent.mkdir(parents=True, exist_ok=True)
                with source, target.open("wb") as file:
                    shutil.copyfileobj(source, file, PIECE)
                if target.stat().st_size != size:
                    raise ValueError(f"{path} has another size than the archive says")
    except OSError as error:
        if error.errno is not None:
            raise
        raise SourceError(f"the archive cannot be read: {error}") from error  # of gzip
    except Exception as error:  # tarfile and zipfile raise whatever a header makes them raise
        raise SourceError(f"the archive cannot be read: {error or type(error).__name__}") from error
    return most - left


def _members(file: Path, most: int, stack: ExitStack) -> Iterator[tuple[PurePosixPath, int, IO[bytes]]]:
    """Path, size in bytes and content of each file to read."""
    stream = stack.enter_context(file.open("rb"))
    start = stream.read(4)
    stream.seek(0)
    if start.startswith(b"PK"):
        _check_directory(stream)
        opened = stack.enter_context(zipfile.ZipFile(stream))
        for entry in opened.infolist():
            path = safe_path(entry.filename)
            if is_read(path.name) and not entry.is_dir():
                if stat.S_ISLNK(entry.external_attr >> 16):
                    raise ValueError(f"{path} is a link")
                yield path, entry.file_size, opened.open(entry)
        return
    plain: Any = gzip.GzipFile(fileobj=stream) if start.startswith(b"\x1f\x8b") else stream
    tar = stack.enter_context(tarfile.TarFile(fileobj=_Limited(plain, most)))
    for number, member in enumerate(tar):
        if number == MAX_MEMBERS:
            raise ValueError(f"it has more than {MAX_MEMBERS} members")
        path = safe_path(member.name)
        if is_read(path.name) and not member.isdir():
            found = tar.extractfile(member) if member.isreg() and not member.issparse() else None
            if found is None:
                raise ValueError(f"{path} is no plain file")
            yield path, member.size, found
        tar.members.clear()  # type: ignore[attr-defined]  # it keeps each header


def _check_directory(stream: IO[bytes]) -> None:
    """zipfile reads the whole directory of an archive into memory. Raises ValueError."""
    stream.seek(max(0, stream.seek(0, io.SEEK_END) - TAIL))
    tail = stream.read()
    stream.seek(0)
    end = tail.rfind(b"PK\5\6")
    if b"PK\6\7" in tail or not 0 <= end <= len(tail) - 22:
        raise ValueError("it is no zip archive, or one of zip64: make a tar.gz")
    if int.from_bytes(tail[end + 12 : end + 16], "little") > MAX_DIRECTORY:
        raise ValueError("its directory is too large")


class _Limited(io.RawIOBase):
    """A tar stream, up to a position. A header may claim any size, and tarfile reads it at once."""

    def __init__(self, stream: IO[bytes], most: int) -> None:
        self._stream, self._most = stream, most

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= PIECE:
            raise ValueError("a header in it is too large")
        self._check(self._stream.tell() + size)
        return self._stream.read(size)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._stream.tell()

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_SET:
            self._check(position)
        return self._stream.seek(position, whence)

    def _check(self, position: int) -> None:
        if position > self._most + PIECE:
            raise ValueError(f"it unpacks to more than {self._most} bytes")
