"""SamplingParams under the path that TensorRT-LLM has it at."""

from __future__ import annotations

from manylora.llmapi.sampling import SamplingParams

__all__ = ["SamplingParams"]
