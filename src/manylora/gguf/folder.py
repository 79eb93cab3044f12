"""A folder that stands for a GGUF file wherever a model's folder is expected. It has links to the file's
parts, and its metadata as config.json, tokenizer.json and so on.

The number of these folders is limited: the least recently used ones are removed unless a process uses them.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from manylora.errors import ConfigError
from manylora.gguf.config import config_json, generation_json, sentence_files
from manylora.gguf.container import NAMED, Header, part_name, part_paths, read_parts
from manylora.gguf.tokenizer import has_tokenizer, tokenizer_config, tokenizer_json
from manylora.system import folders

SETTING, MOST_FOLDERS = "MANYLORA_GGUF_FOLDERS", 32
_held: dict[Path, int] = {}
"""Folder -> its descriptor, with a shared lock until this process ends: a server reads its folder again."""


def hold(folder: Path) -> bool:
    """Keep a folder from being removed while this process lives. Returns False if it does not exist or is
    incomplete.
    """
    if folder in _held and (folder / "config.json").is_file():
        return True
    try:
        descriptor = folders.hold(folder)
    except FileNotFoundError:
        return False
    if not (folder / "config.json").is_file():  # removed before it was locked
        os.close(descriptor)
        return False
    _held[folder] = descriptor
    with suppress(OSError):  # it belongs to another user
        os.utime(folder)
    return True


def most_folders() -> int:
    """Raises ConfigError for a setting that is not a number of at least 1."""
    given = os.environ.get(SETTING, "").strip()
    if not given:
        return MOST_FOLDERS
    if not given.isdecimal() or int(given) < 1:
        raise ConfigError(f"{SETTING} must be a whole number of at least 1, got {given!r}")
    return int(given)


def remove_old(base: Path) -> None:
    """Remove folders in `base` beyond the limit, least recently used first. Folders that cannot be removed
    stay, because another process uses them or they belong to another user.
    """
    found = [(_used(one), one) for one in base.iterdir() if one.is_dir() and not one.name.startswith(".")]
    spare = len(found) - most_folders()
    for _, folder in sorted(found):
        if spare > 0:
            spare -= remove(folder)


def _used(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:
        return 0.0


def remove(folder: Path) -> bool:
    """Returns whether it was removed: not if a process uses it."""
    return folders.remove_unless_held(folder, "config.json")


LINK = "model.gguf"
VERSION = 3  # version of a folder's contents
MOST_FACTORS = 2**12


def is_gguf(path: Path) -> bool:
    """Whether this is a GGUF file, or the name of a part of one."""
    return path.suffix.lower() == ".gguf" and (path.is_file() or NAMED.fullmatch(path.stem) is not None)


def linked_files(folder: Path) -> list[Path]:
    """The links to a GGUF file's parts in the folder that stands for it. Empty for any other folder."""
    whole = folder / LINK
    return [whole] if whole.is_file() else sorted(folder.glob("model-*-of-*.gguf"))


def gguf_folder(path: Path) -> Path:
    """The folder of a GGUF file, or of the file that `path` is a part of, in `~/.cache/manylora/gguf`.
    Created if necessary.

    A changed file gets another folder. The least recently used folders are removed. Raises ConfigError.
    """
    parts = part_paths(path.absolute())
    files = [part.resolve() for part in parts]
    named = f"{VERSION}"
    for file in files:
        stat = file.stat()
        named += f" {file} {stat.st_size} {stat.st_mtime_ns}"
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "manylora" / "gguf"
    folder = base / f"{parts[0].stem}-{hashlib.blake2b(named.encode(), digest_size=8).hexdigest()}"
    if hold(folder):
        return folder
    texts = _texts(read_parts(parts[0]))
    count = len(files)
    links = [LINK] if count == 1 else [part_name("model", one, count) for one in range(1, count + 1)]
    try:
        base.mkdir(parents=True, exist_ok=True)
        _make(base, folder, texts, dict(zip(links, files, strict=True)))
        if not hold(folder):
            raise OSError(errno.ENOENT, f"{folder} was removed")
    except OSError as error:
        raise ConfigError(
            f"{path}: a folder for its tokenizer cannot be made in {base}: {error.strerror}; XDG_CACHE_HOME "
            "names another place"
        ) from error
    remove_old(base)
    return folder


def _make(base: Path, folder: Path, texts: dict[str, str], links: dict[str, Path]) -> None:
    """Create all of it, or nothing. Raises OSError."""
    made = Path(tempfile.mkdtemp(prefix=".making-", dir=base))
    try:
        made.chmod(0o755)
        for name, text in texts.items():
            (made / name).parent.mkdir(exist_ok=True)
            (made / name).write_text(text, encoding="utf-8")
        for name, file in links.items():
            (made / name).symlink_to(file)
        if not (folder / "config.json").is_file():
            remove(folder)  # remains of an interrupted removal
        made.rename(folder)
    except OSError:
        shutil.rmtree(made, ignore_errors=True)
        if not (folder / "config.json").is_file():  # otherwise another process was faster
            raise


def _texts(header: Header) -> dict[str, str]:
    """Raises ConfigError."""
    found: dict[str, Any] = {
        "config.json": config_json(header, lambda name: _factors(header, name)),
        "generation_config.json": generation_json(header),
        **sentence_files(header),
    }
    if has_tokenizer(header):
        found |= {"tokenizer.json": tokenizer_json(header), "tokenizer_config.json": tokenizer_config(header)}
    return {name: json.dumps(content, ensure_ascii=False) for name, content in found.items()}


def _factors(header: Header, name: str) -> list[float]:
    import numpy as np

    info = header.tensors[name]
    if info.kind != "F32" or len(info.shape) != 1 or info.shape[0] > MOST_FACTORS:
        raise ConfigError(
            f"{header.path}: {name} must be a vector of F32, got {info.kind} {list(info.shape)}"
        )
    with part_paths(header.path)[info.part].open("rb") as file:
        file.seek(info.offset)
        return np.frombuffer(file.read(info.nbytes), dtype="<f4").tolist()
