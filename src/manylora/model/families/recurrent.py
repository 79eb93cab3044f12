"""Qwen3-Next, Qwen3.5 and 3.6 (gated delta rules, gated attention), and LFM2 (short convolutions)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manylora.config.blocks import ConvConfig, DeltaConfig, RoutingConfig
from manylora.config.model import MoeConfig
from manylora.errors import ConfigError
from manylora.model.families.common import (
    read_activation,
    read_biases,
    recurrent_layers,
    refuse,
    text_settings,
)
from manylora.model.families.family import ModelFamily, TensorNames
from manylora.model.families.llama import PLAIN
from manylora.model.families.moe import checked_moe, qwen_experts

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


def _qwen_moe(raw: Mapping[str, Any]) -> dict[str, Any]:
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
    return {**raw, "intermediate_size": raw["moe_intermediate_size"]}


LFM2 = {
    "vocab_size": 65536, "hidden_size": 2560, "intermediate_size": 12288, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": None, "hidden_act": "silu",
    "max_position_embeddings": 128000, "norm_eps": 1e-5, "tie_word_embeddings": True,
    "rope_theta": 1000000.0, "conv_bias": False, "conv_L_cache": 3, "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True, "full_attn_idxs": None,
    "layer_types": None,
}  # fmt: skip
LFM2_MOE = {
    **{name: value for name, value in LFM2.items() if not name.startswith(("block_", "full_"))},
    "hidden_size": 2048, "intermediate_size": 7168, "moe_intermediate_size": 1792, "num_dense_layers": 2,
    "num_experts_per_tok": 4, "num_experts": 32, "use_expert_bias": True, "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
}  # fmt: skip
LFM2_ALIASES = {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"}
LFM2_NAMES = TensorNames(
    norm="embedding_norm",
    out="self_attn.out_proj",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    recurrent="conv",
    recurrent_in=("in_proj",),
    up_gate=("feed_forward.w3", "feed_forward.w1"),
    down="feed_forward.w2",
    block_norms={"attention_norm": "operator_norm", "mlp_norm": "ffn_norm"},
    sparse="feed_forward",
    corrections=("expert_bias",),
    expert_up_gate=("w3", "w1"),
    expert_down="w2",
)


def _lfm2(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {**_lfm2_layers(raw), "intermediate_size": _inner_size(raw)}


def _lfm2_layers(raw: Mapping[str, Any]) -> dict[str, Any]:
    refuse(raw, "conv_bias")
    return {"norm_eps": raw["norm_eps"], "qk_norm": "head", "recurrent": _convolutions(raw)}


def _lfm2_moe(raw: Mapping[str, Any]) -> dict[str, Any]:
    """All layers except the first ones have experts."""
    layers = frozenset(range(raw["num_dense_layers"], raw["num_hidden_layers"]))
    routing = RoutingConfig(
        "sigmoid", bool(raw["use_expert_bias"]), scale=float(raw["routed_scaling_factor"]), added=1e-6
    )
    moe = MoeConfig(
        raw["num_experts"], raw["num_experts_per_tok"], raw["moe_intermediate_size"],
        bool(raw["norm_topk_prob"]), layers, routing=routing,
    )  # fmt: skip
    return {**_lfm2_layers(raw), "moe": checked_moe(moe)}


def _convolutions(raw: Mapping[str, Any]) -> ConvConfig | None:
    """The convolution layers: `conv` in `layer_types`, or else those not in `full_attn_idxs`."""
    count, attended = raw["num_hidden_layers"], raw.get("full_attn_idxs")
    kinds = raw["layer_types"]
    if kinds is None:
        full = range(count) if attended is None else attended
        kinds = ["full_attention" if layer in full else "conv" for layer in range(count)]
    layers = recurrent_layers(raw, kinds, "conv")
    if raw["conv_L_cache"] < 2:
        raise ConfigError(f"config.json: conv_L_cache must be at least 2, got {raw['conv_L_cache']}")
    return ConvConfig(layers, raw["hidden_size"], raw["conv_L_cache"]) if layers else None


def _inner_size(raw: Mapping[str, Any]) -> int:
    """Two thirds of that in config.json, rounded up to a multiple, or the size itself."""
    size, factor = raw["intermediate_size"], raw["block_ffn_dim_multiplier"]
    if not raw["block_auto_adjust_ff_dim"]:
        return size
    size = int(2 * size / 3)
    if factor is None:
        return size
    return -(-int(factor * size) // raw["block_multiple_of"]) * raw["block_multiple_of"]


FAMILIES = {
    "Qwen3NextForCausalLM": ModelFamily(NEXT, _next, lambda _: QWEN3_NEXT, rope=ROPE),
    "Qwen3_5ForCausalLM": ModelFamily(DENSE, _dense, lambda _: QWEN3_5, rope=ROPE),
    "Qwen3_5ForConditionalGeneration": ModelFamily(
        OUTSIDE, _dense, lambda _: QWEN3_5, lambda raw: text_settings(raw, DENSE), rope=ROPE
    ),
    "Qwen3_5MoeForCausalLM": ModelFamily(MOE_35, _qwen_moe, lambda _: QWEN3_5, _as_dense, rope=ROPE),
    "Qwen3_5MoeForConditionalGeneration": ModelFamily(
        OUTSIDE, _qwen_moe, lambda _: QWEN3_5, lambda raw: _as_dense(text_settings(raw, MOE_35)), rope=ROPE
    ),
    "Lfm2ForCausalLM": ModelFamily(LFM2, _lfm2, lambda _: LFM2_NAMES, aliases=LFM2_ALIASES),
    "Lfm2MoeForCausalLM": ModelFamily(
        LFM2_MOE, _lfm2_moe, lambda _: LFM2_NAMES, aliases={"tie_embedding": "tie_word_embeddings"}
    ),
}
