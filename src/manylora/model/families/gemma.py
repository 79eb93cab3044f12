"""Gemma 1, 2 and the text models of Gemma 3: norms of 1 + weight, a scaled embedding, gated GELU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from manylora.model.families.common import (
    flat_rope,
    read_activation,
    read_biases,
    read_windows,
    text_settings,
)
from manylora.model.families.family import ModelFamily, TensorNames, text_tower

GEMMA2 = TensorNames(
    block_norms={
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }
)
GEMMA = {
    "vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 8192, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "rope_theta": 10000.0, "attention_bias": False,
}  # fmt: skip
GEMMA2_DEFAULTS = {
    **GEMMA, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "layer_types": None,
    "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0,
}  # fmt: skip
GEMMA3 = {
    **GEMMA2_DEFAULTS, "vocab_size": 262208, "max_position_embeddings": 131072, "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6, "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
}  # fmt: skip
WITHOUT_HEAD = {"makes_text": False, "tie_word_embeddings": True}
ENCODER = {**WITHOUT_HEAD, "bidirectional": True}
MULTIMODAL = {"text_config": None, "tie_word_embeddings": True}


def _gemma(raw: Mapping[str, Any]) -> dict[str, Any]:
    # The first releases specify gelu, but were trained with its tanh approximation.
    name = "gelu_pytorch_tanh" if raw["hidden_act"] == "gelu" else raw["hidden_act"]
    return {**_shared(raw), "activation": read_activation(name)}


def _shared(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "norm": "rms_plus_one",
        "embedding_scale": float(raw["hidden_size"]) ** 0.5,
        **read_biases(raw),
    }


def _gemma2(raw: Mapping[str, Any]) -> dict[str, Any]:
    every_second = [layer % 2 == 0 for layer in range(raw["num_hidden_layers"])]
    return {**_capped(raw), "sliding_windows": read_windows(raw, every_second)}


def _gemma3(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Layers with a window have a separate rotary base and no scaling. With bidirectional attention, half of
    the window is on each side."""
    pattern = raw["sliding_window_pattern"]
    sliding = [(layer + 1) % pattern != 0 for layer in range(raw["num_hidden_layers"])]
    if raw.get("use_bidirectional_attention"):
        raw = {**raw, "sliding_window": raw["sliding_window"] // 2 + 1}
    return {
        **_capped(raw),
        "attention_softcap": None,  # transformers reads attn_logit_softcapping and does not use it
        **(ENCODER if raw.get("use_bidirectional_attention") else {}),
        "rope_local_theta": float(raw["rope_local_base_freq"]),
        "qk_norm": "head",
        "sliding_windows": read_windows(raw, sliding),
    }


def _gemma3_model(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A model without a language model head, such as EmbeddingGemma."""
    return {**_gemma3(raw), **WITHOUT_HEAD}


def _text_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    return flat_rope(text_settings(raw, GEMMA3))


def _capped(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_shared(raw),
        "activation": read_activation(raw["hidden_activation"]),
        "attention_scale": float(raw["query_pre_attn_scalar"]) ** -0.5,
        "attention_softcap": raw["attn_logit_softcapping"],
        "logits_softcap": raw["final_logit_softcapping"],
    }


FAMILIES = {
    "GemmaForCausalLM": ModelFamily(GEMMA, _gemma),
    "Gemma2ForCausalLM": ModelFamily(GEMMA2_DEFAULTS, _gemma2, lambda _: GEMMA2),
    "Gemma3ForCausalLM": ModelFamily(GEMMA3, _gemma3, lambda _: GEMMA2, flat_rope),
    "Gemma3TextModel": ModelFamily(
        GEMMA3, _gemma3_model, lambda _: replace(GEMMA2, unused=("2_Dense.", "3_Dense.")), flat_rope
    ),
    "Gemma3ForConditionalGeneration": ModelFamily(
        MULTIMODAL, _gemma3, lambda _: text_tower(GEMMA2), _text_config
    ),
}
