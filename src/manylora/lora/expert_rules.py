"""When modules of routed experts may be target modules."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from manylora.config.model import ModelConfig
from manylora.errors import ConfigError
from manylora.lora.modules import EXPERT_IDS, MODULE_NAMES, LoraModule, lora_modules
from manylora.quant.config import QuantAlgo

logger = logging.getLogger("manylora")

EXPERT_MODULES = tuple(MODULE_NAMES[module_id] for module_id in EXPERT_IDS)
BACKEND = "CUTLASS"


def check_moe_backend(backend: str | None, targets: tuple[str, ...], model: ModelConfig) -> None:
    """Check the name of the backend: only TensorRT-LLM's backend that supports adapters of experts is
    accepted.

    targets: as for `lora_modules`. Raises ConfigError.
    """
    if backend is None or backend.upper() == BACKEND:
        return
    served = {module.name for module in lora_modules(model, targets).values()}
    adapted = [name for name in EXPERT_MODULES if name in served]
    if adapted:
        raise ConfigError(
            f"Routed-expert MoE LoRA requires moe_backend='{BACKEND}'; got moe_backend='{backend}'. Disable "
            f"LoRA on MoE modules (remove {adapted} from lora_config.lora_target_modules) or switch to the "
            "Cutlass MoE backend."
        )
    raise ConfigError(f"LLM: moe_backend must be '{BACKEND}' or left out, got '{backend}'")


def targets_beside_quantised_experts(
    targets: tuple[str, ...], model: ModelConfig, algo: str | None
) -> tuple[str, ...]:
    """Target modules of a model whose experts are quantised with `algo`.

    With FP8 and MXFP4 any. Otherwise, if none are named, all modules except those of experts. Raises
    ConfigError if modules of experts are named.
    """
    if algo in (QuantAlgo.FP8, QuantAlgo.W4A16_MXFP4):
        return targets
    adapted = [name for name in EXPERT_MODULES if name in targets]
    if adapted:
        raise ConfigError(
            "Routed-expert MoE LoRA only supports unquantized fp16/bf16 or per-tensor FP8 (qdq) base "
            f"weights; got quant_mode={algo}. Disable LoRA on MoE modules (remove {adapted} from "
            "lora_config.lora_target_modules) or serve the model unquantised or in FP8."
        )
    if targets:
        return targets
    logger.info("adapters on routed experts are off: the experts are quantised")
    return tuple(module.name for module in beside_experts(lora_modules(model)).values())


def beside_experts(modules: Mapping[int, LoraModule]) -> dict[int, LoraModule]:
    """All modules except those of routed experts."""
    return {module_id: module for module_id, module in modules.items() if module_id not in EXPERT_IDS}
