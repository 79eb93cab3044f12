"""The arguments of `LLM`, also from files, and the engine settings they stand for."""

from __future__ import annotations

import difflib
import importlib
import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypedDict

from manylora.config import foreign
from manylora.config.engine import SETTINGS
from manylora.config.resolve import rename
from manylora.config.values import CONVERTERS
from manylora.errors import ConfigError
from manylora.llmapi.llm_args import KvCacheConfig, NGramDecodingConfig, PeftCacheConfig
from manylora.llmapi.lora import LoraConfig
from manylora.quant.config import QuantConfig

logger = logging.getLogger("manylora")


class LlmArguments(TypedDict, total=False):
    """Arguments of `LLM` except the model and its tokenizer. None: the default."""

    device: str | None
    dtype: str | None
    max_batch_size: int | None
    max_num_tokens: int | None
    max_seq_len: int | None
    max_beam_width: int | None
    max_queue_size: int | None
    gpu_memory_utilization: float | None
    batch_scheduler_policy: str | None
    enable_chunked_prefill: bool | None
    disable_overlap_scheduler: bool | None
    enable_cuda_graph: bool | None
    cuda_graph_cache_size: int | None
    stream_interval: int | None
    wrap_input_ids: bool | None
    tensor_parallel_size: int | None
    pipeline_parallel_size: int | None
    moe_expert_parallel_size: int | None
    quant_config: QuantConfig | None
    lora_config: LoraConfig | None
    peft_cache_config: PeftCacheConfig | None
    kv_cache_config: KvCacheConfig | None
    speculative_config: NGramDecodingConfig | None
    guided_decoding_backend: str | None
    enable_lora: bool | None
    moe_backend: str | None


PARTS: dict[str, type] = {
    "quant_config": QuantConfig,
    "lora_config": LoraConfig,
    "peft_cache_config": PeftCacheConfig,
    "kv_cache_config": KvCacheConfig,
    "speculative_config": NGramDecodingConfig,
}
ARGUMENTS = {row.llm: row for row in SETTINGS if row.llm}
"""The rows of the engine's settings by argument, PART.FIELD in a nested config."""
# Where TensorRT-LLM documents different defaults for its Python API and its Triton backend.
DEFAULTS: dict[str, Any] = {
    "gpu_memory_fraction": PeftCacheConfig.device_cache_percent,
    "max_beam_width": None,  # max_batch_size
}
# Fields of LoraConfig that determine how adapters are read.
READING = {
    "lora_dir", "lora_ckpt_source", "trtllm_modules_to_hf_modules", "swap_gate_up_proj_lora_b_weight",
    "lora_text_only",
}  # fmt: skip
GUIDE_BACKENDS = ("llguidance", "xgrammar")
KNOWN = tuple(LlmArguments.__annotations__)
# Further arguments of `LLM`.
OF_FILES = (
    "tokenizer", "skip_tokenizer_init", "revision", "tokenizer_revision", "lora_root", "lora_trust",
    "lora_alias", "lora_tokenizer_bytes", "generation_config", "override_generation_config",
)  # fmt: skip
OTHER_NAMES = {
    name: row.llm
    for row in ARGUMENTS.values()
    for name in (*row.flags, row.parameter)
    if name is not None and name not in KNOWN
} | {"quantization": "quant_config"}
"""What other doors and vLLM call arguments."""


def engine_settings(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of `resolve`. Nested configs are instances of their classes. Raises ConfigError."""
    given = {name: value for name, value in arguments.items() if name not in PARTS}
    for name, kind in PARTS.items():
        part = arguments.get(name)
        if part is None:
            continue
        if not isinstance(part, kind):
            raise ConfigError(f"LLM: {name} must be a {kind.__name__}, got {part!r:.80}")
        for one in getattr(part, "given", [one.name for one in fields(kind)]):
            argument, value = f"{name}.{one}", getattr(part, one)
            given[argument] = value
            if argument not in ARGUMENTS and one not in READING and value != getattr(kind, one, None):
                logger.warning("%s has no effect here", argument)
    for name, row in ARGUMENTS.items():
        values, value = row.llm_values, given.get(name)
        if values is not None and value is not None:
            if value not in values:
                raise ConfigError(f"{name} must be one of {', '.join(map(str, values))}, got {value!r}")
            given[name] = values[value]
    return rename(given, ARGUMENTS)


def check_known(arguments: Mapping[str, Any]) -> None:
    """Raises ConfigError for an argument that is unknown or asks for something unavailable."""
    for name, value in arguments.items():
        if name not in KNOWN and value is not None and not foreign.LLM.allows(name, value):
            raise ConfigError(f"LLM: {name} is not supported, got {value!r}; {_instead_of(name)}")


def _instead_of(name: str) -> str:
    part, _, field = OTHER_NAMES.get(name, "").rpartition(".")
    if part:
        return f"use {part}={PARTS[part].__name__}({field}=…)"
    if field:
        return f"use {field}" + ("=False" if name == "enforce_eager" else "")
    near = difflib.get_close_matches(name, [*KNOWN, *OF_FILES], n=1)
    return f"did you mean {near[0]}?" if near else "leave it out"


def read_options(path: Path) -> dict[str, Any]:
    """A file's top-level keys. YAML needs pyyaml; without it the file must be JSON. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    try:
        load, hint = importlib.import_module("yaml").safe_load, ""
    except ImportError:
        load, hint = json.loads, " (pyyaml is not installed, so it must be JSON)"
    try:
        loaded = load(text)
    except Exception as error:  # JSON and YAML raise different errors
        raise ConfigError(f"{path} cannot be read{hint}: {' '.join(str(error).split())}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} must hold options by name")
    return loaded


def llm_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `LLM`. null means not set. Raises ConfigError for an unknown key."""
    given = {name: value for name, value in options.items() if value is not None}
    check_names("option", given, [*KNOWN, *OF_FILES, *foreign.LLM])
    return given | {name: _part(name, PARTS[name], given[name]) for name in PARTS if name in given}


def check_names(kind: str, given: Collection[str], known: Collection[str]) -> None:
    """Raises ConfigError for the first unknown name, with the nearest known one."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"options are {', '.join(known)}"
            raise ConfigError(f"unknown {kind}: {name}; {hint}")


def _part(name: str, kind: type, value: Any) -> Any:
    if not isinstance(value, Mapping):
        raise ConfigError(f"option {name} must hold its fields by name, got {value!r:.80}")
    try:
        value = kind.named(value) if hasattr(kind, "named") else value
    except ValueError as error:
        raise ConfigError(f"option {name}: {error}") from error
    check_names(f"field of {name}", value, [one.name for one in fields(kind)])
    value = dict(value)
    for one in fields(kind):
        convert = CONVERTERS.get(str(one.type).removesuffix(" | None"))
        if convert is not None and value.get(one.name) is not None:
            try:
                value[one.name] = convert(value[one.name])
            except ValueError as error:
                raise ConfigError(f"option {name}: {one.name} {error}") from error
    try:
        return kind(**value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"option {name}: {error}") from error
