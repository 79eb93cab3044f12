"""LoraConfig under the path that TensorRT-LLM had it at first."""

from __future__ import annotations

from manylora.llmapi.lora import LoraConfig

__all__ = ["LoraConfig"]
