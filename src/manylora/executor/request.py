"""LoRARequest under the path that TensorRT-LLM has it at."""

from __future__ import annotations

from manylora.llmapi.lora import LoRARequest

__all__ = ["LoRARequest"]
