"""manylora: one base LLM, very many LoRA adapters, served by Triton Inference Server or from Python.

Names are imported when they are first asked for, so that the package itself costs nothing.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manylora.llmapi import (
        LLM,
        GuidedDecodingParams,
        KvCacheConfig,
        LoraConfig,
        LoRARequest,
        PeftCacheConfig,
        QuantAlgo,
        QuantConfig,
        RequestOutput,
        SamplingParams,
    )

__all__ = [
    "LLM",
    "GuidedDecodingParams",
    "KvCacheConfig",
    "LoRARequest",
    "LoraConfig",
    "PeftCacheConfig",
    "QuantAlgo",
    "QuantConfig",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]

__version__ = "0.1.0"

# How long threads of a CPU step spin for each other: about 50 us, longer than between two operations.
# libgomp reads it when torch is imported; its own choice is milliseconds, and beside other work the
# threads then wait for one another's turns.
if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "1000"


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("manylora.llmapi"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
