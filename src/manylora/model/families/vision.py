"""The text models of Qwen 2-VL, 2.5-VL and 3-VL, LLaVA and LLaVA-NeXT. A text token has the same position on
all axes, so plain rotary positions are correct. Gemma 3, Mistral 3, Llama 4: see their text models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from manylora.errors import ConfigError
from manylora.model.families.common import SU, read_biases, text_settings
from manylora.model.families.family import ModelFamily, TensorNames, text_tower
from manylora.model.families.llama import FAMILIES as TEXT
from manylora.model.families.llama import LLAMA, MISTRAL, PLAIN, QWEN2, QWEN3
from manylora.model.families.moe import qwen_experts

OUTER = {"text_config": None, "tie_word_embeddings": False}
QWEN2_VL = {
    **QWEN2, "vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_window_layers": 80,
    "rope_theta": 1000000.0,
}  # fmt: skip
QWEN3_VL = {
    **QWEN3, "hidden_size": 4096, "max_position_embeddings": 128000, "rope_theta": 500000.0,
    "use_sliding_window": False,
}  # fmt: skip
QWEN3_VL_MOE = {
    **PLAIN, "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 128000,
    "rope_theta": 500000.0, "attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": None,
    "moe_intermediate_size": 1408, "num_experts": 60, "num_experts_per_tok": 4,
}  # fmt: skip
MROPE = {"renamed": {**SU, "mrope": "default"}}
# The keys are the model_type of LLaVA's text model.
LLAVA_TEXT = {
    "llama": (LLAMA, "LlamaForCausalLM"),
    "mistral": (MISTRAL, "MistralForCausalLM"),
    "qwen2": (QWEN2, "Qwen2ForCausalLM"),
}


def _qwen(raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> Mapping[str, Any]:
    """The first releases have the text model's keys at the top level."""
    own = {name: value for name, value in raw.items() if name not in ("text_config", "vision_config")}
    return _tied(raw, text_settings({**raw, "text_config": raw["text_config"] or own}, defaults))


def _llava(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    kind = (raw["text_config"] or {}).get("model_type", "llama")
    if kind not in LLAVA_TEXT:
        raise ConfigError(
            f"config.json: text_config.model_type {kind!r} is not supported: it must be one of "
            + ", ".join(LLAVA_TEXT)
        )
    return {**_tied(raw, text_settings(raw, LLAVA_TEXT[kind][0])), "model_type": kind}


def _tied(raw: Mapping[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    inner = (raw["text_config"] or {}).get("tie_word_embeddings", False)
    return {**text, "tie_word_embeddings": bool(raw["tie_word_embeddings"] or inner)}


def _qwen3_vl_moe(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The experts of a layer are in one tensor: [in, out] in released files, [out, in] in transformers 5."""
    count = raw.get("num_local_experts") or raw["num_experts"]  # transformers 5's name, and released files'
    moe = qwen_experts({**raw, "num_experts": count, "norm_topk_prob": True})
    experts = None if moe is None else replace(moe, transposed=True, either_way=True)
    return {**read_biases(raw), "qk_norm": "head", "moe": experts}


def _beside_visual(_: object) -> TensorNames:
    names = text_tower(TensorNames())
    return replace(names, head="lm_head", unused=("visual.", "model.visual."))


LLAVA = ModelFamily(
    OUTER,
    lambda raw: TEXT[LLAVA_TEXT[raw["model_type"]][1]].config(raw),
    lambda _: text_tower(TensorNames()),
    _llava,
)
FAMILIES = {
    **dict.fromkeys(
        ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
        ModelFamily(
            OUTER,
            TEXT["Qwen2ForCausalLM"].config,
            _beside_visual,
            partial(_qwen, defaults=QWEN2_VL),
            rope=MROPE,
        ),
    ),
    "Qwen3VLForConditionalGeneration": ModelFamily(
        OUTER, TEXT["Qwen3ForCausalLM"].config, _beside_visual, partial(_qwen, defaults=QWEN3_VL), rope=MROPE
    ),
    "Qwen3VLMoeForConditionalGeneration": ModelFamily(
        OUTER,
        _qwen3_vl_moe,
        _beside_visual,
        lambda raw: text_settings(raw, QWEN3_VL_MOE),
        rope=MROPE,
    ),
    **dict.fromkeys(("LlavaForConditionalGeneration", "LlavaNextForConditionalGeneration"), LLAVA),
}
