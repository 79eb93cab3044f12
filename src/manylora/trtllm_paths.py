"""TensorRT-LLM's import paths, as modules without files: `manylora.executor.request` has LoRARequest."""

from __future__ import annotations

import importlib
import sys
from functools import partial
from types import ModuleType
from typing import Any

PYTHON = "manylora.doors.python"
ARGUMENTS = ("KvCacheConfig", "LoraConfig", "NGramDecodingConfig", "PeftCacheConfig")
LLMAPI = (
    "LLM", "CompletionOutput", "GuidedDecodingParams", "KvCacheConfig", "LoRARequest", "Logprob",
    "LoraConfig", "NGramDecodingConfig", "PeftCacheConfig", "PoolingParams", "PoolingRequestOutput",
    "QuantAlgo", "QuantConfig", "RequestOutput", "RequestTimings", "SamplingParams",
)  # fmt: skip
PATHS = {
    "_torch.peft.lora.moe_layout": {
        "make_per_expert_lora": "manylora.adapters.moe_layout",
        "reference_moe_lora_delta": "manylora.adapters.moe_layout",
    },
    "executor.request": {"LoRARequest": PYTHON},
    "llmapi": dict.fromkeys(LLMAPI, PYTHON),
    "llmapi.llm_args": dict.fromkeys(ARGUMENTS, PYTHON),
    "lora_helper": {"LoraConfig": PYTHON},
    "lora_manager": {"LoraConfig": PYTHON},
    "models.modeling_utils": {"QuantConfig": PYTHON},
    "quantization.mode": {"QuantAlgo": PYTHON},
    "sampling_params": {"GuidedDecodingParams": PYTHON, "SamplingParams": PYTHON},
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
