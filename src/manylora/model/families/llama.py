"""Llama and similar families: RMSNorm, rotary positions, a gated MLP, sequential blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manylora.model.families.common import read_biases, read_windows
from manylora.model.families.family import ModelFamily, TensorNames

PHI3 = TensorNames(qkv=("self_attn.qkv_proj",), up_gate=("mlp.gate_up_proj",))
# As transformers 5.23 has them; 4.44 and 4.57 have the same, but for what docs/models.md names.
PLAIN = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu",
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}  # fmt: skip
LLAMA = {**PLAIN, "attention_bias": False, "mlp_bias": False}
MISTRAL = {
    **PLAIN, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "sliding_window": 4096,
}  # fmt: skip
QWEN2 = {
    **PLAIN, "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32,
    "max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096,
    "max_window_layers": 28, "layer_types": None,
}  # fmt: skip
QWEN3 = {**QWEN2, "head_dim": 128, "attention_bias": False}
PHI3_DEFAULTS = {
    **PLAIN, "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192,
    "max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "sliding_window": None, "partial_rotary_factor": 1.0,
}  # fmt: skip
GRANITE = {
    **LLAMA, "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}  # fmt: skip
OLMO2_DEFAULTS = {**PLAIN, "vocab_size": 50304, "rms_norm_eps": 1e-5, "attention_bias": False}

# Its first releases say su or yarn.
PHI3_ROPE = {
    "partial": "partial_rotary_factor", "renamed": {"su": "longrope", "yarn": "longrope"},
}  # fmt: skip
# Olmo 2 normalises the outputs of attention and MLP in place of their inputs.
OLMO2 = TensorNames(
    block_norms={
        "attention_post_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }
)


def _llama(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {**read_biases(raw), "mlp_bias": bool(raw["mlp_bias"])}


def _mistral(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {"sliding_windows": read_windows(raw)}


def _qwen2(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {"attention_bias": True, "sliding_windows": _qwen_windows(raw)}


def _qwen3(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {**read_biases(raw), "qk_norm": "head", "sliding_windows": _qwen_windows(raw)}


def _phi3(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {**_mistral(raw), "rope_restarts": True}


def _granite(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_llama(raw),
        "embedding_scale": float(raw["embedding_multiplier"]),
        "residual_scale": float(raw["residual_multiplier"]),
        "attention_scale": float(raw["attention_multiplier"]),
        "logits_scale": 1.0 / float(raw["logits_scaling"]),
    }


def _olmo2(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {**read_biases(raw), "qk_norm": "all"}


def _qwen_windows(raw: Mapping[str, Any]) -> tuple[int | None, ...]:
    if not raw["use_sliding_window"]:
        return ()
    first = raw["max_window_layers"]
    return read_windows(raw, [layer >= first for layer in range(raw["num_hidden_layers"])])


FAMILIES = {
    "LlamaForCausalLM": ModelFamily(LLAMA, _llama),
    "MistralForCausalLM": ModelFamily(MISTRAL, _mistral),
    "Qwen2ForCausalLM": ModelFamily(QWEN2, _qwen2),
    "Qwen3ForCausalLM": ModelFamily(QWEN3, _qwen3),
    "Phi3ForCausalLM": ModelFamily(PHI3_DEFAULTS, _phi3, lambda _: PHI3, rope=PHI3_ROPE),
    "GraniteForCausalLM": ModelFamily(GRANITE, _granite),
    "Olmo2ForCausalLM": ModelFamily(OLMO2_DEFAULTS, _olmo2, lambda _: OLMO2),
}
