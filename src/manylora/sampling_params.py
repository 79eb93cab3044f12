"""SamplingParams and GuidedDecodingParams under TensorRT-LLM's import path."""

from __future__ import annotations

from manylora.generation.sampling import GuidedDecodingParams, SamplingParams

__all__ = ["GuidedDecodingParams", "SamplingParams"]
