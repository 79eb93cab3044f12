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

from manylora.config.resolve import KEYS, rename
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


# The order matters: if two names mean one setting, the last wins.
PARTS: dict[str, type] = {
    "quant_config": QuantConfig,
    "lora_config": LoraConfig,
    "peft_cache_config": PeftCacheConfig,
    "kv_cache_config": KvCacheConfig,
    "speculative_config": NGramDecodingConfig,
}
# Arguments (PART.FIELD in a nested config) whose name differs from the setting's.
RENAMED = {
    "enable_chunked_prefill": "enable_chunked_context",
    "disable_overlap_scheduler": "enable_overlap",
    "lora_config.lora_target_modules": "target_modules",
    "lora_config.lora_adapter_dtype": "lora_adapter_dtype",
    "lora_config.lora_text_only": "text_only",
    "peft_cache_config.device_cache_percent": "gpu_memory_fraction",
    "peft_cache_config.device_cache_size": "gpu_memory_bytes",
    "peft_cache_config.host_cache_size": "host_memory_bytes",
    "peft_cache_config.disk_cache_size": "disk_cache_bytes",
    "kv_cache_config.dtype": "kv_cache_quant_algo",
    "kv_cache_config.max_tokens": "max_tokens_in_paged_kv_cache",
    "kv_cache_config.free_gpu_memory_fraction": "kv_cache_free_gpu_mem_fraction",
    "kv_cache_config.enable_block_reuse": "enable_kv_cache_reuse",
    "speculative_config.is_use_oldest": "ngram_use_oldest",
    "speculative_config.max_concurrency": "max_draft_concurrency",
}
_FIELDS = {f"{part}.{one.name}": one.name for part, kind in PARTS.items() for one in fields(kind)}
_ARGUMENTS = {name: name for name in LlmArguments.__annotations__} | _FIELDS | RENAMED
NAMES = {name: key for name, key in _ARGUMENTS.items() if key in KEYS}
"""Every argument (PART.FIELD in a nested config) that is a setting, with the setting."""
# Arguments whose values differ from the setting's. None: not set.
VALUES: dict[str, dict[Any, Any]] = {
    "disable_overlap_scheduler": {True: False, False: None},
    "kv_cache_config.dtype": {"fp8": "FP8", "auto": None},
}
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
# vLLM's and trtllm-serve's names of arguments. PART.FIELD is a field of a nested config.
OTHER_NAMES = {
    "max_model_len": "max_seq_len",
    "max_num_seqs": "max_batch_size",
    "max_num_batched_tokens": "max_num_tokens",
    "max_loras": "lora_config.max_loras",
    "max_cpu_loras": "lora_config.max_cpu_loras",
    "max_lora_rank": "lora_config.max_lora_rank",
    "lora_dtype": "lora_config.lora_adapter_dtype",
    "lora_target_modules": "lora_config.lora_target_modules",
    "enable_prefix_caching": "kv_cache_config.enable_block_reuse",
    "block_size": "kv_cache_config.tokens_per_block",
    "kv_cache_dtype": "kv_cache_config.dtype",
    "kv_cache_free_gpu_memory_fraction": "kv_cache_config.free_gpu_memory_fraction",
    "enforce_eager": "enable_cuda_graph",
    "quantization": "quant_config",
}
GUIDE_BACKENDS = ("llguidance", "xgrammar")
KNOWN = tuple(LlmArguments.__annotations__)
# Further arguments of `LLM`.
OF_FILES = (
    "tokenizer", "skip_tokenizer_init", "revision", "tokenizer_revision", "lora_root", "lora_trust",
    "lora_alias", "lora_tokenizer_bytes", "generation_config", "override_generation_config",
)  # fmt: skip
# Arguments of TensorRT-LLM without a meaning here, with the accepted values. None is always accepted.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "backend": ("pytorch",),
    "tokenizer_mode": ("auto",),
    "load_format": ("auto",),
    "context_parallel_size": (1,),
    "trust_remote_code": (True, False),
}


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
            if argument not in NAMES and one not in READING and value != getattr(kind, one, None):
                logger.warning("%s has no effect here", argument)
    for name, values in VALUES.items():
        if given.get(name) is not None and given[name] not in values:
            raise ConfigError(f"{name} must be one of {', '.join(map(str, values))}, got {given[name]!r}")
        given[name] = values.get(given.get(name))
    return rename(given, NAMES)


def check_known(arguments: Mapping[str, Any]) -> None:
    """Raises ConfigError for an argument that is unknown or asks for something unavailable."""
    for name, value in arguments.items():
        if name not in KNOWN and value is not None and value not in NEUTRAL.get(name, ()):
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
    check_names("option", given, [*KNOWN, *OF_FILES, *NEUTRAL])
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
