"""A folder that stands for a GGUF file wherever a model's folder is asked for: a link to the file, and what
its metadata says as config.json, tokenizer.json and so on."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from manylora.errors import ConfigError
from manylora.gguf.config import config_json, generation_json
from manylora.gguf.container import Header, read_header
from manylora.gguf.tokenizer import has_tokenizer, tokenizer_config, tokenizer_json

logger = logging.getLogger("manylora")

LINK = "model.gguf"
VERSION = 1  # of what is written into a folder
MOST_FACTORS = 2**12


def is_gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf" and path.is_file()


def gguf_folder(path: Path) -> Path:
    """The folder of a GGUF file, made if there is none, in `~/.cache/manylora/gguf`. It is another one when
    the file has changed. Raises ConfigError."""
    path = path.resolve()
    stat = path.stat()
    named = f"{VERSION} {path} {stat.st_size} {stat.st_mtime_ns}"
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "manylora" / "gguf"
    folder = base / f"{path.stem}-{hashlib.blake2b(named.encode(), digest_size=8).hexdigest()}"
    if (folder / "config.json").is_file():
        return folder
    texts = _texts(read_header(path))
    try:
        base.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=".making-", dir=base))
        try:
            made.chmod(0o755)
            for name, text in texts.items():
                (made / name).write_text(text, encoding="utf-8")
            (made / LINK).symlink_to(path)
            made.rename(folder)
        except OSError:
            shutil.rmtree(made, ignore_errors=True)
            if not (folder / "config.json").is_file():  # else another process was faster
                raise
    except OSError as error:
        raise ConfigError(
            f"{path}: a folder for its tokenizer cannot be made in {base}: {error.strerror}; XDG_CACHE_HOME "
            "names another place"
        ) from error
    return folder


def _texts(header: Header) -> dict[str, str]:
    """Raises ConfigError."""
    found: dict[str, Any] = {
        "config.json": config_json(header, lambda name: _factors(header, name)),
        "generation_config.json": generation_json(header),
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
    with header.path.open("rb") as file:
        file.seek(info.offset)
        return np.frombuffer(file.read(info.nbytes), dtype="<f4").tolist()
