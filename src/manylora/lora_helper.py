"""LoraConfig under TensorRT-LLM's import path."""

from __future__ import annotations

from manylora.llmapi.lora import LoraConfig

__all__ = ["LoraConfig"]
