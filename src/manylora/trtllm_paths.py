"""TensorRT-LLM's import paths, as modules without files: `manylora.executor.request` has LoRARequest."""

from __future__ import annotations

import importlib
import sys
from functools import partial
from types import ModuleType
from typing import Any

PATHS = {
    "_torch.peft.lora.moe_layout": {
        "make_per_expert_lora": "manylora.lora.moe_layout",
        "reference_moe_lora_delta": "manylora.lora.moe_layout",
    },
    "executor.request": {"LoRARequest": "manylora.llmapi"},
    "lora_helper": {"LoraConfig": "manylora.llmapi"},
    "lora_manager": {"LoraConfig": "manylora.llmapi"},
    "models.modeling_utils": {"QuantConfig": "manylora.llmapi"},
    "quantization.mode": {"QuantAlgo": "manylora.llmapi"},
    "sampling_params": {"GuidedDecodingParams": "manylora.llmapi", "SamplingParams": "manylora.llmapi"},
}
"""Path below `manylora` -> name -> the module that has it."""


def register() -> None:
    """Make the paths importable."""
    for path, names in PATHS.items():
        parent, full = sys.modules["manylora"], "manylora"
        for part in path.split("."):
            full = f"{full}.{part}"
            module = sys.modules.setdefault(full, ModuleType(full, "A path of TensorRT-LLM."))
            module.__path__ = []  # lets `import` look for modules below it
            setattr(parent, part, module)
            parent = module
        vars(parent).update(__all__=list(names), __getattr__=partial(_find, full, names))


def _find(module: str, names: dict[str, str], name: str) -> Any:
    if name not in names:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return getattr(importlib.import_module(names[name]), name)
