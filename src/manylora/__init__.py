"""manylora: one base LLM, very many LoRA adapters, served by Triton Inference Server or from Python.

Names are imported on first use, so that importing the package is cheap.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from manylora import trtllm_paths
from manylora.version import __version__

if TYPE_CHECKING:
    from manylora.doors.python import (
        LLM,
        GuidedDecodingParams,
        KvCacheConfig,
        LoraConfig,
        LoRARequest,
        NGramDecodingConfig,
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
    "NGramDecodingConfig",
    "PeftCacheConfig",
    "QuantAlgo",
    "QuantConfig",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]

# How long idle OpenMP threads spin: about 50 us, longer than the gap between operations. libgomp reads it
# when torch is imported, here or in a child process. Its default is milliseconds, on a core that others may
# need.
if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "1000"
trtllm_paths.register()


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("manylora.doors.python"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
