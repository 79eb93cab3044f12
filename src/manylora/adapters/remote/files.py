"""RemoteFile, what a source has. SourceError. Which files of a source are an adapter's."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import PurePosixPath

from manylora.adapters.formats.manifest import MANIFEST
from manylora.config.hub import ADAPTER_FILES
from manylora.errors import ConfigError

MARKS = ("adapter_config.json", "model.lora_weights.npy")  # one of them makes a folder an adapter
NAMES = (
    *MARKS, "adapter_model.safetensors", "model.lora_config.npy", "model.lora_keys.npy",
    "model.lora_invocation_tokens.npy", MANIFEST, "tokenizer.json", "tokenizer_config.json",
    "chat_template.jinja", "generation_config.json",
)  # fmt: skip
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".zip")
SINGLE = (".safetensors", ".nemo")  # adapters in one file
MAX_FILES = 64  # of one adapter


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
    return any(fnmatch(name, one) for one in (*ADAPTER_FILES, "*.nemo"))


def safe_path(name: str) -> PurePosixPath:
    """A name in an archive or a registry as a relative path. Raises ValueError."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or not name.isprintable():
        raise ValueError(f"{name[:80]!r} points outside of its folder")
    return path
