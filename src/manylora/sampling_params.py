"""SamplingParams and GuidedDecodingParams under TensorRT-LLM's import path."""

from __future__ import annotations

from manylora.llmapi.guided import GuidedDecodingParams
from manylora.llmapi.sampling import SamplingParams

__all__ = ["GuidedDecodingParams", "SamplingParams"]
