"""Llama and similar families: RMSNorm, rotary positions, a gated MLP, sequential blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manylora.model.families.common import read_biases, read_windows
from manylora.model.families.family import ModelFamily, TensorNames

PHI3 = TensorNames(qkv=("self_attn.qkv_proj",), up_gate=("mlp.gate_up_proj",))
# Olmo 2 normalises the outputs of attention and MLP in place of their inputs.
OLMO2 = TensorNames(
    block_norms={
        "attention_post_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }
)


def _llama(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {**read_biases(raw), "mlp_bias": bool(raw.get("mlp_bias", False))}


def _mistral(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {"sliding_windows": read_windows(raw)}


def _qwen2(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {"attention_bias": True, "sliding_windows": _qwen_windows(raw)}


def _qwen3(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {**read_biases(raw), "qk_norm": "head", "sliding_windows": _qwen_windows(raw)}


def _granite(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_llama(raw),
        "embedding_scale": float(raw.get("embedding_multiplier", 1.0)),
        "residual_scale": float(raw.get("residual_multiplier", 1.0)),
        "attention_scale": float(raw.get("attention_multiplier", 1.0)),
        "logits_scale": 1.0 / float(raw.get("logits_scaling", 1.0)),
    }


def _olmo2(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {**read_biases(raw), "qk_norm": "all"}


def _qwen_windows(raw: Mapping[str, Any]) -> tuple[int | None, ...]:
    if not raw.get("use_sliding_window", False):
        return ()
    first = raw.get("max_window_layers", 0)
    return read_windows(raw, [layer >= first for layer in range(raw["num_hidden_layers"])])


FAMILIES = {
    "LlamaForCausalLM": ModelFamily(_llama),
    "MistralForCausalLM": ModelFamily(_mistral),
    "Qwen2ForCausalLM": ModelFamily(_qwen2),
    "Qwen3ForCausalLM": ModelFamily(_qwen3),
    "Phi3ForCausalLM": ModelFamily(_mistral, lambda _: PHI3),
    "GraniteForCausalLM": ModelFamily(_granite),
    "Olmo2ForCausalLM": ModelFamily(_olmo2, lambda _: OLMO2),
}
