"""Gemma 1, 2 and the text models of Gemma 3: norms of 1 + weight, a scaled embedding, gated GELU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from manylora.errors import ConfigError
from manylora.model.families.common import read_activation, read_biases, read_rope, read_windows, refuse
from manylora.model.families.family import ModelFamily, TensorNames

GEMMA2 = TensorNames(
    block_norms={
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }
)
GEMMA3_TEXT = replace(
    GEMMA2,
    roots=("language_model.model.", "model.language_model."),
    head="language_model.lm_head",
    unused=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
)
# Defaults of transformers, which the released multimodal checkpoints leave out of text_config.
GEMMA3_DEFAULTS = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}


def _gemma(raw: Mapping[str, Any]) -> dict[str, Any]:
    refuse(raw, "use_bidirectional_attention")
    activation = raw.get("hidden_activation") or raw.get("hidden_act") or "gelu_pytorch_tanh"
    # The first releases of Gemma 1 say gelu but were trained with its tanh form.
    activation = "gelu_pytorch_tanh" if activation == "gelu" else activation
    return {
        "norm": "rms_plus_one",
        "activation": read_activation(activation),
        "embedding_scale": float(raw["hidden_size"]) ** 0.5,
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", True)),
        **read_biases(raw),
    }


def _gemma2(raw: Mapping[str, Any]) -> dict[str, Any]:
    every_second = [layer % 2 == 0 for layer in range(raw["num_hidden_layers"])]
    return {**_gemma(raw), **_caps(raw), "sliding_windows": read_windows(raw, every_second)}


def _gemma3(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Layers with a window have a separate rotary base."""
    pattern = raw.get("sliding_window_pattern") or raw.get("_sliding_window_pattern") or 6
    sliding = [(layer + 1) % pattern != 0 for layer in range(raw["num_hidden_layers"])]
    local = float(raw.get("rope_local_base_freq", 10000.0))
    parameters = raw.get("rope_parameters") or {}
    flat = dict(raw)
    if "full_attention" in parameters:
        own = parameters.get("sliding_attention") or {}
        if own.get("rope_type", "default") != "default":
            raise ConfigError(
                f"config.json: rope scaling {own['rope_type']!r} of sliding_attention is not supported"
            )
        local = float(own.get("rope_theta", local))
        flat["rope_parameters"] = parameters["full_attention"]
    elif not raw.get("rope_theta"):
        flat["rope_theta"] = 1_000_000.0
    return {
        **_gemma(raw),
        **_caps(raw),
        **read_rope(flat),
        "rope_local_theta": local,
        "qk_norm": "head",
        "sliding_windows": read_windows(raw, sliding),
    }


def _text_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The text part of a multimodal config.json, with the dtype of the whole model."""
    outer = {name: raw[name] for name in ("dtype", "torch_dtype") if name in raw}
    return {**GEMMA3_DEFAULTS, **raw["text_config"], **outer}


def _caps(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attention_scale": float(raw["query_pre_attn_scalar"]) ** -0.5,
        "attention_softcap": raw.get("attn_logit_softcapping"),
        "logits_softcap": raw.get("final_logit_softcapping"),
    }


FAMILIES = {
    "GemmaForCausalLM": ModelFamily(_gemma),
    "Gemma2ForCausalLM": ModelFamily(_gemma2, lambda _: GEMMA2),
    "Gemma3ForCausalLM": ModelFamily(_gemma3, lambda _: GEMMA2),
    "Gemma3ForConditionalGeneration": ModelFamily(_gemma3, lambda _: GEMMA3_TEXT, _text_config),
}
