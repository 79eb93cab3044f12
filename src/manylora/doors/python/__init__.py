"""The Python API, modelled on TensorRT-LLM's. `LLM` needs torch, so it is imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from manylora.checkpoints.quant.config import QuantAlgo, QuantConfig
from manylora.doors.python.llm_args import (
    KvCacheConfig,
    LoraConfig,
    LoRARequest,
    NGramDecodingConfig,
    PeftCacheConfig,
)
from manylora.doors.python.outputs import PoolingRequestOutput, RequestOutput, RequestTimings
from manylora.generation.outputs import CompletionOutput, Logprob, PoolingParams
from manylora.generation.sampling import GuidedDecodingParams, SamplingParams

if TYPE_CHECKING:
    from manylora.doors.python.llm import LLM

__all__ = [
    "LLM",
    "CompletionOutput",
    "GuidedDecodingParams",
    "KvCacheConfig",
    "LoRARequest",
    "Logprob",
    "LoraConfig",
    "NGramDecodingConfig",
    "PeftCacheConfig",
    "PoolingParams",
    "PoolingRequestOutput",
    "QuantAlgo",
    "QuantConfig",
    "RequestOutput",
    "RequestTimings",
    "SamplingParams",
]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from manylora.doors.python.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
