"""RemoteFile: a file of an adapter at its source. `unpack`: files of adapters from archives."""

from __future__ import annotations

import gzip
import shutil
import tarfile
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from manylora.adapters.formats.manifest import MANIFEST
from manylora.config.model_folder import ADAPTER_FILES
from manylora.errors import ConfigError

MARKS = ("adapter_config.json", "model.lora_weights.npy")  # one of them makes a folder an adapter
NAMES = (
    *MARKS, "adapter_model.safetensors", "adapters.safetensors", "automodel_peft_config.json",
    "model.lora_config.npy", "model.lora_keys.npy", "model.lora_invocation_tokens.npy", MANIFEST,
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
ARCHIVES = (".tar", ".tar.gz", ".tgz")
SINGLE = (".safetensors", ".nemo", ".gguf")  # adapters in one file
MAX_FILES = 64  # of one adapter
MAX_MEMBERS = 2**16  # an OCI image may hold a whole system
PIECE = 2**20


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
    """Write what `is_read` of a tar or tar.gz below a folder. most: bytes of the whole unpacked archive,
    which may contain anything. Raises SourceError, OSError.
    """
    try:
        with archive.open("rb") as stream:
            packed = stream.read(2) == b"\x1f\x8b"
            stream.seek(0)
            limited: Any = _Limited(gzip.GzipFile(fileobj=stream) if packed else stream, most)
            tar: Any = tarfile.TarFile(fileobj=limited)
            for number, member in enumerate(tar):
                path, most = safe_path(member.name), most - member.size
                if most < 0 or number == MAX_MEMBERS:
                    raise ValueError("it has more bytes or members than an adapter may have")
                if is_read(path.name) and not member.isdir():
                    if not member.isreg() or member.issparse():
                        raise ValueError(f"{member.name[:80]!r} is no plain file")
                    (folder / path).parent.mkdir(parents=True, exist_ok=True)
                    with (folder / path).open("wb") as file:
                        shutil.copyfileobj(tar.extractfile(member), file, PIECE)
                tar.members.clear()  # it keeps each header
    except OSError as error:
        if error.errno is not None:
            raise
        raise SourceError(f"the archive cannot be read: {error}") from error  # of gzip
    except Exception as error:  # tarfile raises whatever a header makes it raise
        raise SourceError(f"the archive cannot be read: {error or type(error).__name__}") from error


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
