"""The arguments of `LLM`, also from files, and the engine's configuration that they stand for."""

from __future__ import annotations

import difflib
import importlib
import json
import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from manylora.adapters.formats.base_weights import BaseWeights
from manylora.adapters.formats.peft.names import ATTENTION_IDS, EXPERT_PATHS, MLP_IDS
from manylora.adapters.formats.read_options import ReadOptions
from manylora.adapters.formats.sources import find_source, read_lora
from manylora.adapters.modules import MODULE_NAMES, LoraModule, check_moe_backend, lora_modules
from manylora.adapters.remote.resolver import AdapterSources
from manylora.checkpoints.quant.config import QuantConfig
from manylora.config import foreign
from manylora.config.engine import SETTINGS, EngineConfig, rename, resolve
from manylora.config.model import ModelConfig
from manylora.config.settings import CONVERTERS
from manylora.doors.python.llm_args import KvCacheConfig, LoraConfig, NGramDecodingConfig, PeftCacheConfig
from manylora.errors import AdapterError, ConfigError
from manylora.model.checkpoint import read_model_config

logger = logging.getLogger("manylora")


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
# Arguments of `LLM` except the model, its tokenizer and OF_FILES. None: the default.
KNOWN = (
    *(name for name in ARGUMENTS if "." not in name), *PARTS, "guided_decoding_backend", "enable_lora",
    "moe_backend",
)  # fmt: skip
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


def engine_config(model_dir: Path, arguments: Mapping[str, Any], **settings: Any) -> EngineConfig:
    """Nested configs are instances; settings override. Raises ConfigError; ValueError for a lora_dir."""
    backend, moe = arguments.get("guided_decoding_backend"), arguments.get("moe_backend")
    if backend is not None and backend not in GUIDE_BACKENDS:
        raise ConfigError(f"guided_decoding_backend must be one of {GUIDE_BACKENDS}, got {backend!r}")
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
    given, lora = rename(given, ARGUMENTS), arguments.get("lora_config")
    if lora is not None:
        # Names that the reader already knows may be repeated. It does not accept others.
        known: dict[str, list[str]] = {}
        for hf_name, module_id in [*ATTENTION_IDS.items(), *MLP_IDS.items(), *EXPERT_PATHS.items()]:
            known.setdefault(MODULE_NAMES[module_id], []).append(hf_name)
        for name, theirs in lora.trtllm_modules_to_hf_modules.items():
            given_names, known_names = [theirs] if isinstance(theirs, str) else theirs, known.get(name, [])
            wrong = [one for one in given_names if one not in known_names]
            if wrong:
                raise ConfigError(
                    f"trtllm_modules_to_hf_modules: {name} as {wrong[0]!r} is not supported; known are "
                    + (", ".join(known_names) or "none")
                )
        if lora.lora_dir and not lora.lora_target_modules:
            model = read_model_config(model_dir)
            given["target_modules"] = inferred_targets(lora, model, BaseWeights(model_dir))
    config = resolve(model_dir, {**given, **settings}, DEFAULTS)
    if moe is not None:
        check_moe_backend(moe, config.lora.target_modules, read_model_config(model_dir))
    return config


def check_known(arguments: Mapping[str, Any]) -> None:
    """Raises ConfigError for an argument that is unknown or asks for something unavailable."""
    for name, value in arguments.items():
        if name not in KNOWN and value is not None and not foreign.LLM.allows(name, value):
            near = difflib.get_close_matches(name, [*KNOWN, *OF_FILES], n=1)
            instead = f"did you mean {near[0]}?" if near else "leave it out"
            part, _, field = OTHER_NAMES.get(name, "").rpartition(".")
            if field:
                instead = f"use {part}={PARTS[part].__name__}({field}=…)" if part else f"use {field}"
                instead += "=False" if name == "enforce_eager" else ""
            raise ConfigError(f"LLM: {name} is not supported, got {value!r}; {instead}")


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


def modules_to_read(modules: Mapping[int, LoraModule], lora: LoraConfig | None) -> Mapping[int, LoraModule]:
    """The model's modules in the order that adapter files use. lora: None: PEFT's order."""
    if lora is None or lora.swap_gate_up_proj_lora_b_weight:
        return modules
    return {module_id: replace(module, gate_first=False) for module_id, module in modules.items()}


def inferred_targets(lora: LoraConfig, model: ModelConfig, base: BaseWeights | None) -> tuple[str, ...]:
    """Modules of the adapters in lora_dir. base: for DoRA. Raises ConfigError, ValueError."""
    nemo, options = lora.lora_ckpt_source == "nemo", ReadOptions(lora_modules(model), base)
    options = replace(options, text_only=lora.lora_text_only)
    located = AdapterSources().locate_all(lora.lora_dir)
    names = {name for one in located for name in _modules_of(one.path, nemo, options)}
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
        if not any((*folder.glob("adapter_model.*"), *folder.glob("adapters.safetensors"))):
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
