"""Converts the arguments of `LLM` to the engine's configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from manylora.config.engine import EngineConfig
from manylora.config.model import ModelConfig
from manylora.config.resolve import resolve
from manylora.errors import AdapterError, ConfigError
from manylora.llmapi.lora import LoraConfig
from manylora.llmapi.options import DEFAULTS, GUIDE_BACKENDS, engine_settings
from manylora.lora.formats.base_weights import BaseWeights
from manylora.lora.formats.peft.names import ATTENTION_IDS, EXPERT_PATHS, MLP_IDS
from manylora.lora.formats.read_options import ReadOptions
from manylora.lora.formats.sources import find_source, read_lora
from manylora.lora.modules import MODULE_NAMES, LoraModule, check_moe_backend, lora_modules
from manylora.model.checkpoint import read_model_config

NO_ADAPTERS: Mapping[str, Any] = {
    "optimal_adapter_size": 1, "max_adapter_size": 1, "max_lora_rank": 1, "target_modules": ("attn_q",),
    "max_loras": 1, "max_cpu_loras": 1,
}  # fmt: skip
"""Settings of the smallest possible cache."""
# Errors of the engine name Triton's parameters, which have other names here.
ARGUMENT_NAMES = {
    "lora_cache_host_memory_bytes": "PeftCacheConfig.host_cache_size (or LoraConfig.max_cpu_loras)",
    "lora_cache_gpu_memory_fraction": "PeftCacheConfig.device_cache_percent (or LoraConfig.max_loras)",
    "lora_cache_max_adapter_size": "PeftCacheConfig.max_adapter_size",
    "kv_cache_free_gpu_mem_fraction": "KvCacheConfig.free_gpu_memory_fraction",
    "tokenizer_dir": "tokenizer",
}


def modules_to_read(modules: Mapping[int, LoraModule], lora: LoraConfig | None) -> Mapping[int, LoraModule]:
    """The model's modules in the order that adapter files use. lora: None: PEFT's order."""
    if lora is None or lora.swap_gate_up_proj_lora_b_weight:
        return modules
    return {module_id: replace(module, gate_first=False) for module_id, module in modules.items()}


def engine_config(model_dir: Path, arguments: Mapping[str, Any], **settings: Any) -> EngineConfig:
    """arguments: of `LLM`. settings: of `resolve`, which override them.

    Raises ConfigError for a configuration that cannot be served, ValueError for a lora_dir that is not an
    adapter.
    """
    backend, moe = arguments.get("guided_decoding_backend"), arguments.get("moe_backend")
    if backend is not None and backend not in GUIDE_BACKENDS:
        raise ConfigError(f"guided_decoding_backend must be one of {GUIDE_BACKENDS}, got {backend!r}")
    given, lora = engine_settings(arguments), arguments.get("lora_config")
    if lora is not None:
        _check_names(lora)
        if lora.lora_dir and not lora.lora_target_modules:
            model = read_model_config(model_dir)
            given["target_modules"] = inferred_targets(lora, model, BaseWeights(model_dir))
    config = resolve(model_dir, {**given, **settings}, DEFAULTS)
    if moe is not None:
        check_moe_backend(moe, config.lora.target_modules, read_model_config(model_dir))
    return config


def inferred_targets(lora: LoraConfig, model: ModelConfig, base: BaseWeights | None) -> tuple[str, ...]:
    """Names of the modules in the adapters of lora_dir. base: the base model's weights, for DoRA.

    Raises ConfigError, ValueError.
    """
    nemo, options = lora.lora_ckpt_source == "nemo", ReadOptions(lora_modules(model), base)
    options = replace(options, text_only=lora.lora_text_only)
    names = {name for folder in lora.lora_dir for name in _modules_of(Path(folder), nemo, options)}
    return tuple(name for name in MODULE_NAMES if name in names)


def parameter_names(text: str, names: Mapping[str, str] = ARGUMENT_NAMES) -> str:
    """An error's text with the names that users of `LLM`, or of another door, know."""
    theirs = "|".join(map(re.escape, names))
    return re.sub(rf"(?<![\w.-])({theirs})\b", lambda match: names[match[1]], text)


def _modules_of(folder: Path, nemo: bool, options: ReadOptions) -> set[str]:
    """Names of the modules that an adapter has."""
    config = folder / "adapter_config.json"
    if not (nemo or (folder / "model.lora_weights.npy").exists()):
        if not config.exists():
            raise ValueError(f"{config} does not exist")
        if not config.is_file():
            raise ValueError(f"{config} is not a file")
        if not any(folder.glob("adapter_model.*")):
            raise ValueError(f"adapter_model file does not exist in {folder}")
    try:
        source = find_source(folder)
        if nemo and source.kind == "peft":
            raise ConfigError(
                f"lora_dir {folder} is an adapter of PEFT, no NeMo checkpoint: leave lora_ckpt_source out"
            )
        rows = read_lora(source, 0, options).config
    except AdapterError as error:
        raise ConfigError(f"lora_dir {folder}: {error}") from error
    assert rows is not None
    return {MODULE_NAMES[module_id] for module_id in rows[0, :, 0].tolist()}


def _check_names(lora: LoraConfig) -> None:
    """Names that the reader already knows may be repeated. It does not accept others."""
    known: dict[str, list[str]] = {}
    for hf_name, module_id in [*ATTENTION_IDS.items(), *MLP_IDS.items(), *EXPERT_PATHS.items()]:
        known.setdefault(MODULE_NAMES[module_id], []).append(hf_name)
    for name, theirs in lora.trtllm_modules_to_hf_modules.items():
        for hf_name in [theirs] if isinstance(theirs, str) else theirs:
            if hf_name not in known.get(name, ()):
                raise ConfigError(
                    f"trtllm_modules_to_hf_modules: {name} as {hf_name!r} is not supported; known are "
                    + (", ".join(known.get(name, ())) or "none")
                )
