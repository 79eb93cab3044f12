"""Qwen3-Next, Qwen3.5 and 3.6 (text): gated delta rules in most layers, gated attention in the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manylora.config.blocks import DeltaConfig
from manylora.errors import ConfigError
from manylora.model.families.common import read_activation, read_biases, recurrent_layers, text_settings
from manylora.model.families.family import ModelFamily, TensorNames
from manylora.model.families.llama import PLAIN
from manylora.model.families.moe import qwen_experts

SPARSE = {
    "decoder_sparse_step": 1, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 10, "num_experts": 512, "norm_topk_prob": True, "mlp_only_layers": None,
}  # fmt: skip
DENSE = {
    **PLAIN, "vocab_size": 248320, "intermediate_size": 12288, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25, "attention_bias": False, "layer_types": None,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32,
}  # fmt: skip
NEXT = {
    **DENSE, **SPARSE, "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632,
    "num_hidden_layers": 48, "num_key_value_heads": 2,
}  # fmt: skip
MOE_35 = {
    **DENSE, "hidden_size": 2048, "num_hidden_layers": 40, "num_key_value_heads": 2,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts_per_tok": 8,
    "num_experts": 256,
}  # fmt: skip
# unused: tensors for multi-token prediction, and the vision part.
QWEN3_NEXT = TensorNames(unused=("mtp.",), recurrent_in=("in_proj_qkvz", "in_proj_ba"))
QWEN3_5 = TensorNames(
    roots=("model.language_model.", "model."),
    unused=("mtp.", "model.visual."),
    recurrent_in=("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
)
ROPE = {"partial": "partial_rotary_factor"}
OUTSIDE = {"text_config": None, "tie_word_embeddings": False}


def _next(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {**_dense(raw), "moe": qwen_experts(raw, raw["shared_expert_intermediate_size"])}


def _moe(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Every layer has experts, and their weights are normalised to a sum of 1."""
    return _next({**SPARSE, **raw, "decoder_sparse_step": 1, "mlp_only_layers": None, "norm_topk_prob": True})


def _dense(raw: Mapping[str, Any]) -> dict[str, Any]:
    if read_activation(raw["hidden_act"]) != "silu":
        raise ConfigError(f"config.json: hidden_act {raw['hidden_act']!r} is not supported here; silu is")
    return {
        **read_biases(raw),
        "norm": "rms_plus_one",
        "qk_norm": "head",
        "attention_gated": True,
        "recurrent": _recurrent(raw),
    }


def _recurrent(raw: Mapping[str, Any]) -> DeltaConfig | None:
    """The recurrent layers: from `layer_types`, or else all but each `full_attention_interval`-th one."""
    count, interval = raw["num_hidden_layers"], raw.get("full_attention_interval", 4)
    kinds = raw["layer_types"] or [
        "linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(count)
    ]
    layers = recurrent_layers(raw, kinds)
    if not layers:
        return None
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    sizes = [raw[f"linear_{name}"] for name in names]
    recurrent = DeltaConfig(layers, *sizes)
    if min(sizes) < 1 or recurrent.taps < 2 or recurrent.value_heads % recurrent.key_heads:
        raise ConfigError(
            "config.json: linear_num_value_heads must be a multiple of linear_num_key_heads, and "
            f"linear_conv_kernel_dim at least 2, got {sizes[1]}, {sizes[0]} and {sizes[4]}"
        )
    return recurrent


def _as_dense(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Sets intermediate_size, which these models lack because no layer has a plain MLP."""
    return {**raw, "intermediate_size": raw["moe_intermediate_size"]}


FAMILIES = {
    "Qwen3NextForCausalLM": ModelFamily(NEXT, _next, lambda _: QWEN3_NEXT, rope=ROPE),
    "Qwen3_5ForCausalLM": ModelFamily(DENSE, _dense, lambda _: QWEN3_5, rope=ROPE),
    "Qwen3_5ForConditionalGeneration": ModelFamily(
        OUTSIDE, _dense, lambda _: QWEN3_5, lambda raw: text_settings(raw, DENSE), rope=ROPE
    ),
    "Qwen3_5MoeForCausalLM": ModelFamily(MOE_35, _moe, lambda _: QWEN3_5, _as_dense, rope=ROPE),
    "Qwen3_5MoeForConditionalGeneration": ModelFamily(
        OUTSIDE, _moe, lambda _: QWEN3_5, lambda raw: _as_dense(text_settings(raw, MOE_35)), rope=ROPE
    ),
}
