"""SamplingParams and GuidedDecodingParams under the path that TensorRT-LLM has them at."""

from __future__ import annotations

from manylora.llmapi.guided import GuidedDecodingParams
from manylora.llmapi.sampling import SamplingParams

__all__ = ["GuidedDecodingParams", "SamplingParams"]
