"""RemoteFile: a file of an adapter at its source. SourceError. `unpack`: files of adapters from archives."""

from __future__ import annotations

import gzip
import shutil
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import IO, Any

from manylora.adapters.formats.manifest import MANIFEST
from manylora.config.hub import ADAPTER_FILES
from manylora.errors import ConfigError

MARKS = ("adapter_config.json", "model.lora_weights.npy")  # one of them makes a folder an adapter
NAMES = (
    *MARKS, "adapter_model.safetensors", "adapters.safetensors", "automodel_peft_config.json",
    "model.lora_config.npy", "model.lora_keys.npy", "model.lora_invocation_tokens.npy", MANIFEST,
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".zip")
SINGLE = (".safetensors", ".nemo", ".gguf")  # adapters in one file
MAX_FILES = 64  # of one adapter
MAX_MEMBERS = 2**16  # an OCI image may hold a whole system
PIECE = 2**20
TAIL, MAX_DIRECTORY = 2**16 + 64, 2**24  # bytes of a zip: its end, and its directory, which is read at once


class SourceError(ConfigError):
    """An adapter cannot be had from its source. passing: it may work later. missing: there is none."""

    def __init__(self, text: str, *, passing: bool = False, missing: bool = False) -> None:
        super().__init__(text)
        self.passing, self.missing = passing, missing


@dataclass(frozen=True)
class RemoteFile:
    """name: in the adapter's folder. place: where its source has it. size: in bytes; None: not known.
    version: changes with its content; "": not known. unpack: it is an archive.
    """

    name: str
    place: str
    size: int | None = None
    version: str = ""
    unpack: bool = False


def is_read(name: str) -> bool:
    """Whether an adapter's file of this name is read. Never a pickle."""
    return name.endswith(SINGLE) or any(fnmatch(name, one) for one in ADAPTER_FILES)


def safe_path(name: str) -> PurePosixPath:
    """A name in an archive or a registry as a relative path. Raises ValueError."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or not name.isprintable():
        raise ValueError(f"{name[:80]!r} points outside of its folder")
    return path


def unpack(archive: Path, folder: Path, most: int) -> None:
    """Write what `is_read` of a tar, tar.gz or zip below a folder. most: bytes of the whole unpacked archive,
    which may contain anything. Raises SourceError, OSError.
    """
    try:
        with archive.open("rb") as stream:
            for number, (name, size, source) in enumerate(_members(stream, most)):
                path, most = safe_path(name), most - size
                if most < 0 or number == MAX_MEMBERS:
                    raise ValueError("it has more bytes or members than an adapter may have")
                if is_read(path.name) and not (folder / path).is_dir():
                    (folder / path).parent.mkdir(parents=True, exist_ok=True)
                    with source() as content, (folder / path).open("wb") as file:
                        shutil.copyfileobj(content, file, PIECE)
    except OSError as error:
        if error.errno is not None:
            raise
        raise SourceError(f"the archive cannot be read: {error}") from error  # of gzip
    except Exception as error:  # tarfile and zipfile raise whatever a header makes them raise
        raise SourceError(f"the archive cannot be read: {error or type(error).__name__}") from error


def _members(stream: IO[bytes], most: int) -> Iterator[tuple[str, int, Any]]:
    """Name, size in bytes and a function that opens it, of each file."""
    start = stream.read(4)
    if start.startswith(b"PK"):
        stream.seek(max(0, stream.seek(0, 2) - TAIL))
        tail = stream.read()
        end = tail.rfind(b"PK\5\6")
        if (
            b"PK\6\7" in tail
            or end < 0
            or int.from_bytes(tail[end + 12 : end + 16], "little") > MAX_DIRECTORY
        ):
            raise ValueError("it is no zip archive, or has the directory of a very large one: make a tar.gz")
        with zipfile.ZipFile(stream) as archive:
            for entry in archive.infolist():
                yield entry.filename, entry.file_size, lambda: archive.open(entry)  # noqa: B023
        return
    stream.seek(0)
    limited = _Limited(gzip.GzipFile(fileobj=stream) if start.startswith(b"\x1f\x8b") else stream, most)
    tar = tarfile.TarFile(fileobj=limited)  # type: ignore[arg-type]
    for member in tar:
        if member.isreg() and not member.issparse():
            yield member.name, member.size, lambda: tar.extractfile(member)  # noqa: B023
        elif not member.isdir() and is_read(safe_path(member.name).name):
            raise ValueError(f"{member.name[:80]!r} is no plain file")
        tar.members.clear()  # type: ignore[attr-defined]  # it keeps each header


class _Limited:
    """A tar stream, up to a position. A header may claim any size, and tarfile reads it at once."""

    def __init__(self, stream: Any, most: int) -> None:
        self._stream, self._most, self.tell = stream, most, stream.tell

    def read(self, size: int = -1) -> Any:
        if not 0 <= size <= PIECE:
            raise ValueError("a header in it is too large")
        return self._stream.read(size)

    def seek(self, position: int) -> Any:
        if position > self._most:
            raise ValueError("it unpacks to more bytes than an adapter may have")
        return self._stream.seek(position)
