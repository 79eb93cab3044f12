"""LoraConfig, PeftCacheConfig and KvCacheConfig to what the engine is configured with."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from manylora.config.build_record import BuildConfig
from manylora.config.engine import LoraCacheConfig, ModelConfig
from manylora.errors import AdapterError, ConfigError
from manylora.llmapi.llm_args import PeftCacheConfig
from manylora.llmapi.lora import LoraConfig
from manylora.lora.formats.base_weights import BaseWeights
from manylora.lora.formats.peft_experts import EXPERT_PATHS
from manylora.lora.formats.peft_names import ATTENTION_IDS, MLP_IDS
from manylora.lora.formats.sources import find_source, read_lora
from manylora.lora.modules import MODULE_NAMES, LoraModule, lora_modules

__all__ = [
    "built_lora_config", "lora_cache_config", "modules_to_read", "no_lora_cache_config", "parameter_names",
]  # fmt: skip

logger = logging.getLogger("manylora")

# The engine's texts name the parameters of the Triton model; here they have other names.
NAMES = {
    "lora_cache_host_memory_bytes": "PeftCacheConfig.host_cache_size (or LoraConfig.max_cpu_loras)",
    "lora_cache_gpu_memory_fraction": "PeftCacheConfig.device_cache_percent (or LoraConfig.max_loras)",
    "lora_cache_max_adapter_size": "PeftCacheConfig.max_adapter_size",
    "kv_cache_free_gpu_mem_fraction": "KvCacheConfig.free_gpu_memory_fraction",
    "tokenizer_dir": "tokenizer",
}


def modules_to_read(modules: Mapping[int, LoraModule], lora: LoraConfig | None) -> Mapping[int, LoraModule]:
    """The model's modules as the files of adapters have them. lora: None: as PEFT writes them."""
    if lora is None or lora.swap_gate_up_proj_lora_b_weight:
        return modules
    return {module_id: replace(module, gate_first=False) for module_id, module in modules.items()}


def lora_cache_config(
    lora: LoraConfig, cache: PeftCacheConfig, model: ModelConfig, base: BaseWeights | None = None
) -> LoraCacheConfig:
    """Sizes of the adapter cache. M (layer, module) pairs are the target modules on every layer:

    num_device_module_layer = max_lora_rank * M * max_loras, on the host likewise with max_cpu_loras.
    base: the base model's weights, for a lora_dir with DoRA.

    Raises ConfigError for what cannot be served, ValueError for a lora_dir that is no adapter.
    """
    _check_names(lora)
    targets = _targets(lora, model, base)
    counted = sum(module.counted for module in lora_modules(model, targets).values())
    rows = lora.max_lora_rank * model.num_layers * counted
    return LoraCacheConfig(
        optimal_adapter_size=cache.optimal_adapter_size,
        max_adapter_size=max(cache.max_adapter_size, lora.max_lora_rank),
        gpu_memory_fraction=cache.device_cache_percent,
        host_memory_bytes=cache.host_cache_size,
        num_device_module_layer=rows * lora.max_loras if lora.max_loras else cache.num_device_module_layer,
        num_host_module_layer=rows * lora.max_cpu_loras
        if lora.max_cpu_loras
        else cache.num_host_module_layer,
        max_lora_rank=lora.max_lora_rank,
        target_modules=targets,
    )


def built_lora_config(lora: LoraConfig | None, built: BuildConfig) -> LoraConfig | None:
    """Within what `manylora build` recorded. Without a LoraConfig, what it recorded. Raises ConfigError."""
    if not built.lora:
        return lora
    if lora is None:
        return LoraConfig(
            max_lora_rank=built.max_lora_rank or 64, lora_target_modules=list(built.lora_target_modules)
        )
    built.settle("max_lora_rank", lora.max_lora_rank)
    if lora.lora_target_modules or lora.lora_dir:
        return lora
    return replace(lora, lora_target_modules=list(built.lora_target_modules))


def no_lora_cache_config(model: ModelConfig) -> LoraCacheConfig:
    """The smallest cache there can be: without a LoraConfig no adapter is served."""
    rows = 3 * model.num_layers
    return LoraCacheConfig(
        optimal_adapter_size=1,
        max_adapter_size=1,
        num_device_module_layer=rows,
        num_host_module_layer=rows,
        max_lora_rank=1,
        target_modules=("attn_q",),
    )


def parameter_names(text: str) -> str:
    """An error's text with the names that a user of `LLM` knows."""
    for theirs, ours in NAMES.items():
        text = text.replace(theirs, ours)
    return text


def _targets(lora: LoraConfig, model: ModelConfig, base: BaseWeights | None) -> tuple[str, ...]:
    if lora.lora_target_modules:
        return (*lora.lora_target_modules, *lora.missing_qkv_modules)
    if not lora.lora_dir:
        logger.warning(
            "Both lora_dir and lora_target_modules are empty, so all LoRA modules will be expected: "
            "the cache is sized for each of them"
        )
        return ()
    nemo = lora.lora_ckpt_source == "nemo"
    modules = lora_modules(model)
    names = {name for folder in lora.lora_dir for name in _modules_of(Path(folder), nemo, modules, base)}
    return tuple(name for name in MODULE_NAMES if name in names)


def _modules_of(
    folder: Path, nemo: bool, modules: Mapping[int, LoraModule], base: BaseWeights | None
) -> set[str]:
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
        rows = read_lora(find_source(folder), 0, base=base, modules=modules).config
    except AdapterError as error:
        raise ConfigError(f"lora_dir {folder}: {error}") from error
    assert rows is not None
    return {MODULE_NAMES[module_id] for module_id in rows[0, :, 0].tolist()}


def _check_names(lora: LoraConfig) -> None:
    """The names that the reader knows may be given again; it cannot be taught others."""
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
