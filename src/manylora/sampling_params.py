"""SamplingParams and GuidedDecodingParams under TensorRT-LLM's import path."""

from __future__ import annotations

from manylora.llmapi.sampling import GuidedDecodingParams, SamplingParams

__all__ = ["GuidedDecodingParams", "SamplingParams"]
