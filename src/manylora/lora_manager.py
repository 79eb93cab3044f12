"""LoraConfig under the import path of early TensorRT-LLM versions."""

from __future__ import annotations

from manylora.llmapi.lora import LoraConfig

__all__ = ["LoraConfig"]
