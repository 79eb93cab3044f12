"""Options files: the arguments of `LLM` as YAML or JSON, in the keys of TensorRT-LLM."""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from manylora.errors import ConfigError
from manylora.llmapi.llm_args import KvCacheConfig, PeftCacheConfig
from manylora.llmapi.lora import LoraConfig
from manylora.quant.config import QuantConfig

__all__ = ["llm_arguments", "read_options"]

PARTS: dict[str, type] = {
    "lora_config": LoraConfig,
    "peft_cache_config": PeftCacheConfig,
    "kv_cache_config": KvCacheConfig,
    "quant_config": QuantConfig,
}


def read_options(path: Path) -> dict[str, Any]:
    """A file's top-level keys. YAML needs pyyaml; without it the file must be JSON. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    try:
        loaded = _load(text)
    except Exception as error:  # each reader has its own errors
        hint = "" if _yaml() else " (pyyaml is not installed, so it must be JSON)"
        raise ConfigError(f"{path} cannot be read{hint}: {' '.join(str(error).split())}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} must hold options by name")
    return loaded


def llm_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `LLM`. A null asks for nothing. Raises ConfigError for a key that is not known."""
    from manylora.llmapi.llm import LLM, NEUTRAL

    given = {name: value for name, value in options.items() if value is not None}
    parameters = inspect.signature(LLM.__init__).parameters.values()
    named = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    _check_names("option", given, {*named, *NEUTRAL})
    for name, part in PARTS.items():
        if name in given:
            given[name] = _build(name, part, given[name])
    return given


def _build(name: str, part: type, value: Any) -> Any:
    if not isinstance(value, Mapping):
        raise ConfigError(f"option {name} must hold its fields by name, got {value!r:.80}")
    _check_names(f"field of {name}", value, {field.name for field in fields(part)})
    try:
        return part(**value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"option {name}: {error}") from error


def _check_names(kind: str, given: Collection[str], known: Collection[str]) -> None:
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"unknown {kind}: {name}{hint}")


def _load(text: str) -> Any:
    yaml = _yaml()
    return yaml.safe_load(text) if yaml else json.loads(text)


def _yaml() -> Any:
    try:
        return importlib.import_module("yaml")
    except ImportError:
        return None
