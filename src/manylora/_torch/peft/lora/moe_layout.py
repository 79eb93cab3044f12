"""The helpers of `manylora.lora.moe_layout` under TensorRT-LLM's path."""

from __future__ import annotations

from manylora.lora.moe_layout import make_per_expert_lora, reference_moe_lora_delta

__all__ = ["make_per_expert_lora", "reference_moe_lora_delta"]
