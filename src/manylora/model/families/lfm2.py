"""LFM2, dense and with experts: short gated convolutions in most layers, attention in the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manylora.config.blocks import ConvConfig, RoutingConfig
from manylora.config.model import MoeConfig
from manylora.errors import ConfigError
from manylora.model.families.common import recurrent_layers, refuse
from manylora.model.families.family import ModelFamily, TensorNames
from manylora.model.families.moe import checked_moe

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
    refuse(raw, "conv_bias")
    return {
        "norm_eps": raw["norm_eps"],
        "qk_norm": "head",
        "recurrent": _convolutions(raw),
        "intermediate_size": _inner_size(raw),
    }


def _moe(raw: Mapping[str, Any]) -> dict[str, Any]:
    """All layers except the first ones have experts."""
    refuse(raw, "conv_bias")
    layers = frozenset(range(raw["num_dense_layers"], raw["num_hidden_layers"]))
    routing = RoutingConfig(
        "sigmoid", bool(raw["use_expert_bias"]), scale=float(raw["routed_scaling_factor"]), added=1e-6
    )
    moe = MoeConfig(
        raw["num_experts"], raw["num_experts_per_tok"], raw["moe_intermediate_size"],
        bool(raw["norm_topk_prob"]), layers, routing=routing,
    )  # fmt: skip
    return {
        "norm_eps": raw["norm_eps"],
        "qk_norm": "head",
        "recurrent": _convolutions(raw),
        "moe": checked_moe(moe) if layers else None,
    }


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
    """The MLP's size: two thirds of that in config.json, rounded up to a multiple of `block_multiple_of`, or
    the size itself without `block_auto_adjust_ff_dim`."""
    size, factor = raw["intermediate_size"], raw["block_ffn_dim_multiplier"]
    if not raw["block_auto_adjust_ff_dim"]:
        return size
    size = int(2 * size / 3)
    if factor is None:
        return size
    return -(-int(factor * size) // raw["block_multiple_of"]) * raw["block_multiple_of"]


FAMILIES = {
    "Lfm2ForCausalLM": ModelFamily(LFM2, _lfm2, lambda _: LFM2_NAMES, aliases=LFM2_ALIASES),
    "Lfm2MoeForCausalLM": ModelFamily(
        LFM2_MOE, _moe, lambda _: LFM2_NAMES, aliases={"tie_embedding": "tie_word_embeddings"}
    ),
}
