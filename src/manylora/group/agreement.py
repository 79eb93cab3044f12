"""What must be equal on all ranks of a group: the configuration, and the checkpoint's files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import manylora
from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.config.values import CONVERTERS
from manylora.errors import ConfigError
from manylora.quant.config import QuantConfig

WEIGHTS = (".safetensors", ".bin", ".gguf")
OF_RANK_0 = (
    "model_dir", "tokenizer_dir", "prefetch_dir", "catalog_dir", "names_file", "allowed_paths",
    "disk_cache_dir",
)  # fmt: skip
"""Paths, which may differ between hosts. Those of adapters are read only by rank 0."""


def to_values(config: EngineConfig) -> dict[str, Any]:
    """The configuration as JSON-serialisable values."""
    return json.loads(json.dumps(asdict(config), default=str))


def from_values(values: Mapping[str, Any]) -> EngineConfig:
    """The configuration from which `to_values` made these."""
    given = dict(values)
    lora, quant = _typed(LoraCacheConfig, given.pop("lora")), given.pop("quant")
    own = _typed(EngineConfig, given)
    made = None if quant is None else QuantConfig(**quant)
    return EngineConfig(**own, quant=made, lora=LoraCacheConfig(**lora))


def _typed(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    types = {one.name: str(one.type).removesuffix(" | None") for one in fields(kind)}
    convert = {name: CONVERTERS.get(text, lambda value: value) for name, text in types.items()}
    return {name: None if value is None else convert[name](value) for name, value in values.items()}


def identity(config: EngineConfig) -> dict[str, str]:
    """What ranks compare: one line for each part of what they serve."""
    values = to_values(config)
    lora = values.pop("lora")
    settings = {name: value for name, value in {**lora, **values}.items() if name not in OF_RANK_0}
    return {
        "the version of manylora": manylora.__version__,
        "another checkpoint": checkpoint_digest(config.model_dir),
        **{f"another {name}": json.dumps(value) for name, value in sorted(settings.items())},
    }


def check_identity(rank: int, found: Mapping[str, str], expected: Mapping[str, str]) -> None:
    """Raises ConfigError that says what differs from rank 0."""
    for name, value in expected.items():
        if found.get(name) != value:
            more = "" if name == "another checkpoint" else f": {found.get(name)}, rank 0 has {value}"
            what = name if name.startswith("another") else f"another {name.removeprefix('the ')}"
            raise ConfigError(f"rank {rank} was started with {what} than rank 0{more}")


def checkpoint_digest(folder: Path) -> str:
    """Digest of config.json, and of names and sizes of the weight files. Their contents are not read."""
    digest = hashlib.sha256()
    try:
        digest.update((folder / "config.json").read_bytes() if folder.is_dir() else b"")
        files = sorted(folder.iterdir()) if folder.is_dir() else [folder]
        for file in files:
            if file.suffix in WEIGHTS:
                digest.update(f"\0{file.name}\0{file.stat().st_size}".encode())
    except OSError as error:
        raise ConfigError(f"{error.filename or folder} cannot be read: {error.strerror}") from error
    return digest.hexdigest()[:32]
