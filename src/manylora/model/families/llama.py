"""Llama and its kin: RMSNorm, rotary positions, a gated MLP, one block after the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manylora.model.families.common import read_windows
from manylora.model.families.family import Family, Names

__all__ = ["FAMILIES"]

LLAMA = Names()
PHI3 = Names(qkv=("self_attn.qkv_proj",), up_gate=("mlp.gate_up_proj",))
# Olmo 2 normalises what attention and MLP give, not what they get.
OLMO2 = Names(
    block_norms={
        "attention_post_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }
)


def _llama(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {**_biases(raw), "mlp_bias": bool(raw.get("mlp_bias", False))}


def _mistral(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {"sliding_windows": read_windows(raw)}


def _qwen2(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {"attention_bias": True, "sliding_windows": _qwen_windows(raw)}


def _qwen3(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {**_biases(raw), "qk_norm": "head", "sliding_windows": _qwen_windows(raw)}


def _granite(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_llama(raw),
        "embedding_scale": float(raw.get("embedding_multiplier", 1.0)),
        "residual_scale": float(raw.get("residual_multiplier", 1.0)),
        "attention_scale": float(raw.get("attention_multiplier", 1.0)),
        "logits_scale": 1.0 / float(raw.get("logits_scaling", 1.0)),
    }


def _olmo2(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {**_biases(raw), "qk_norm": "all"}


def _biases(raw: Mapping[str, Any]) -> dict[str, Any]:
    biased = bool(raw.get("attention_bias", False))
    return {"attention_bias": biased, "attention_out_bias": biased}


def _qwen_windows(raw: Mapping[str, Any]) -> tuple[int | None, ...]:
    if not raw.get("use_sliding_window", False):
        return ()
    first = raw.get("max_window_layers", 0)
    return read_windows(raw, [layer >= first for layer in range(raw["num_hidden_layers"])])


FAMILIES = {
    "LlamaForCausalLM": Family(_llama, lambda _: LLAMA),
    "MistralForCausalLM": Family(_mistral, lambda _: LLAMA),
    "Qwen2ForCausalLM": Family(_qwen2, lambda _: LLAMA),
    "Qwen3ForCausalLM": Family(_qwen3, lambda _: LLAMA),
    "Phi3ForCausalLM": Family(_mistral, lambda _: PHI3),
    "GraniteForCausalLM": Family(_granite, lambda _: LLAMA),
    "Olmo2ForCausalLM": Family(_olmo2, lambda _: OLMO2),
}
