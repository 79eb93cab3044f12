"""Generation defaults of a base model: its generation_config.json, and what the operator sets instead."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from manylora.config.values import read_settings
from manylora.errors import ConfigError
from manylora.generation.defaults import GenerationDefaults
from manylora.gguf.folder import linked_files

logger = logging.getLogger("manylora")

FILE = "generation_config.json"
NONE = "vllm"  # vLLM's word for: do not read the model's file
DRAWING = ("temperature", "top_k", "top_p", "min_p", "do_sample")
# llama.cpp's own defaults: its files have none, and small models fall apart at temperature 1 without cuts.
LLAMA_CPP: Mapping[str, Any] = MappingProxyType(
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
)


def model_defaults(
    folder: Path, vocab_size: int, source: str = "auto", override: Mapping[str, Any] | None = None
) -> GenerationDefaults:
    """folder: of the model. source: auto (the model's file; for a GGUF file whose metadata says nothing,
    LLAMA_CPP), vllm (none), or a folder with a generation_config.json. override: settings that replace those.

    Settings of the model's own file that are not supported are left out and logged. Raises ConfigError for
    others.
    """
    found: dict[str, Any] = {}
    if source == "auto":
        found = _supported(read_settings(folder / FILE), vocab_size)
        if linked_files(folder) and not any(name in found for name in DRAWING):
            found |= LLAMA_CPP
    elif source != NONE:
        if not (Path(source) / FILE).is_file():
            raise ConfigError(
                f"generation_config {source} has no {FILE}: give auto, vllm, or a folder that has one"
            )
        found = read_settings(Path(source) / FILE)
        _parse(found, vocab_size, f"generation_config {Path(source) / FILE}")
    override = override or {}
    if "temperature" in override and "do_sample" not in override:
        found.pop("do_sample", None)  # false would mean temperature 0
    return _parse({**found, **override}, vocab_size, "override_generation_config")


def _supported(given: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    found = {}
    for name, value in given.items():
        try:
            GenerationDefaults.parse({name: value}, vocab_size)
            found[name] = value
        except ValueError as error:
            logger.warning("the model's %s: %s: it is not used", FILE, error)
    return found


def _parse(given: Mapping[str, Any], vocab_size: int, what: str) -> GenerationDefaults:
    try:
        return GenerationDefaults.parse(dict(given), vocab_size)
    except ValueError as error:
        raise ConfigError(f"{what}: {error}") from error
