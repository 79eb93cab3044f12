"""A folder that stands for a GGUF file: links to its parts, config.json, tokenizer.json and so on."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from manylora.checkpoints.gguf.config import config_json, generation_json, sentence_files
from manylora.checkpoints.gguf.container import NAMED, Header, part_name, part_paths, read_parts
from manylora.checkpoints.gguf.tokenizer import has_tokenizer, tokenizer_config, tokenizer_json
from manylora.errors import ConfigError

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
    Created if necessary. A changed file gets another folder. Raises ConfigError.
    """
    parts = part_paths(path.absolute())
    files = [part.resolve() for part in parts]
    named = f"{VERSION}"
    for file in files:
        stat = file.stat()
        named += f" {file} {stat.st_size} {stat.st_mtime_ns}"
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "manylora" / "gguf"
    folder = base / f"{parts[0].stem}-{hashlib.blake2b(named.encode(), digest_size=8).hexdigest()}"
    if (folder / "config.json").is_file():
        return folder
    texts = _texts(read_parts(parts[0]))
    count = len(files)
    links = [LINK] if count == 1 else [part_name("model", one, count) for one in range(1, count + 1)]
    try:
        base.mkdir(parents=True, exist_ok=True)
        _make(base, folder, texts, dict(zip(links, files, strict=True)))
    except OSError as error:
        raise ConfigError(
            f"{path}: a folder for its tokenizer cannot be made in {base}: {error.strerror}; XDG_CACHE_HOME "
            "names another place"
        ) from error
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
        made.rename(folder)
    except OSError:
        shutil.rmtree(made, ignore_errors=True)
        if not (folder / "config.json").is_file():  # otherwise another process was faster
            raise


def _texts(header: Header) -> dict[str, str]:
    found: dict[str, Any] = {
        "config.json": config_json(header, lambda name: _factors(header, name)),
        "generation_config.json": generation_json(header),
        **sentence_files(header),
    }
    if has_tokenizer(header):
        found |= {"tokenizer.json": tokenizer_json(header), "tokenizer_config.json": tokenizer_config(header)}
    return {name: json.dumps(content, ensure_ascii=False) for name, content in found.items()}


def _factors(header: Header, name: str) -> list[float]:
    info = header.tensors[name]
    if info.kind != "F32" or len(info.shape) != 1 or info.shape[0] > MOST_FACTORS:
        raise ConfigError(
            f"{header.path}: {name} must be a vector of F32, got {info.kind} {list(info.shape)}"
        )
    with part_paths(header.path)[info.part].open("rb") as file:
        file.seek(info.offset)
        return np.frombuffer(file.read(info.nbytes), dtype="<f4").tolist()
