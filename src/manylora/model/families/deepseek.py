"""DeepSeek V2 and V3, the GLM models with experts, and the text models of Llama 4."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from manylora.config.blocks import LatentConfig, RoutingConfig
from manylora.config.model import ModelConfig, MoeConfig
from manylora.errors import ConfigError
from manylora.model.families.common import check_each, read_biases, refuse, text_settings
from manylora.model.families.family import ModelFamily, TensorNames, text_tower
from manylora.model.families.llama import PLAIN
from manylora.model.families.moe import checked_moe

LATENT = {
    **PLAIN, "vocab_size": 102400, "attention_bias": False, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
DEEPSEEK2 = {
    **LATENT, "mlp_bias": False, "first_k_dense_replace": 0, "n_group": None, "topk_group": None,
    "n_routed_experts": 64, "n_shared_experts": 2, "routed_scaling_factor": 1.0, "topk_method": "greedy",
    "num_experts_per_tok": None, "moe_intermediate_size": 1407,
}  # fmt: skip
EXPERTS = {"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True}
DEEPSEEK3 = {
    **LATENT, **EXPERTS, "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "max_position_embeddings": 4096,
    "rope_interleave": True,
}  # fmt: skip
GLM4_MOE = {
    **PLAIN, **EXPERTS, "vocab_size": 151552, "intermediate_size": 10944, "num_hidden_layers": 46,
    "num_attention_heads": 96, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5,
    "attention_bias": False, "moe_intermediate_size": 1408, "num_experts_per_tok": 8,
    "n_routed_experts": 128, "routed_scaling_factor": 1.0, "first_k_dense_replace": 1, "use_qk_norm": False,
}  # fmt: skip
GLM4_LITE = {
    **LATENT, **EXPERTS, "vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240,
    "moe_intermediate_size": 1536, "num_hidden_layers": 47, "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "n_routed_experts": 64, "routed_scaling_factor": 1.8, "q_lora_rank": 768, "v_head_dim": 256,
    "qk_nope_head_dim": 192, "num_experts_per_tok": 4, "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5, "rope_interleave": True, "mlp_layer_types": None,
}  # fmt: skip
LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
EXPERT_ALIASES = {"num_local_experts": "n_routed_experts"}
PREDICTORS = 8  # most layers for multi-token prediction after the last one; released models have 1


def _latent(raw: Mapping[str, Any], pairs: bool) -> dict[str, Any]:
    sizes = LatentConfig(raw["q_lora_rank"] or 0, *(raw[name] for name in LATENT_SIZES))
    if raw["attention_bias"] and not sizes.q_rank:
        raise ConfigError("config.json: attention_bias without q_lora_rank is not supported")
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    share, factor = scaling.get("mscale_all_dim"), float(scaling.get("factor") or 1.0)
    yarn_scale = 1.0  # of queries and of keys, so the scale of attention scores has it twice
    if kind != "default" and share and factor > 1:
        yarn_scale = 0.1 * float(share) * math.log(factor) + 1.0
    return {
        **read_biases(raw),
        "num_kv_heads": 1,
        "head_dim": sizes.cached_dim,
        "latent": sizes,
        "rope_interleaved": pairs,
        "attention_scale": sizes.query_dim**-0.5 * yarn_scale**2,
    }


def _experts(raw: Mapping[str, Any], layers: frozenset[int], routing: RoutingConfig) -> MoeConfig | None:
    if not layers:
        return None
    count, inner, top_k = raw["n_routed_experts"], raw["moe_intermediate_size"], raw["num_experts_per_tok"]
    if top_k is None:
        raise ConfigError("config.json: num_experts_per_tok is missing: how many experts a token has")
    groups, best = routing.groups, routing.top_groups
    if count % groups or not 1 <= best <= groups or routing.group_best > count // groups:
        raise ConfigError(
            f"config.json: n_group {groups} and topk_group {best} do not divide {count} experts into groups "
            f"of {routing.group_best} or more"
        )
    if top_k > count // groups * best:
        raise ConfigError(
            f"config.json: num_experts_per_tok {top_k} is more than the experts of {best} groups"
        )
    shared = inner * (raw["n_shared_experts"] or 0)
    normalised = bool(raw.get("norm_topk_prob")) and routing.scores == "sigmoid"
    return checked_moe(
        MoeConfig(count, top_k, inner, normalised, layers, shared, shared_gated=False, routing=routing)
    )


def _sigmoid(raw: Mapping[str, Any], layers: frozenset[int]) -> MoeConfig | None:
    routing = RoutingConfig(
        "sigmoid",
        corrected=True,
        groups=raw["n_group"],
        top_groups=raw["topk_group"],
        group_best=2,
        least=1e-20,
        scale=float(raw["routed_scaling_factor"]),
        wide=True,
    )
    return _experts(raw, layers, routing)


def _after_first(raw: Mapping[str, Any]) -> frozenset[int]:
    return frozenset(range(raw["first_k_dense_replace"], raw["num_hidden_layers"]))


def _deepseek2(raw: Mapping[str, Any]) -> dict[str, Any]:
    refuse(raw, "mlp_bias")
    method, scale = raw["topk_method"], float(raw["routed_scaling_factor"])
    if method not in ("greedy", "group_limited_greedy"):
        raise ConfigError(f"config.json: topk_method {method!r} is not supported")
    groups = (1, 1) if method == "greedy" else (raw["n_group"], raw["topk_group"])
    routing = RoutingConfig(groups=groups[0], top_groups=groups[1], scale=scale, wide=True)
    return {**_latent(raw, True), "moe": _experts(raw, _after_first(raw), routing)}


def _glm4_lite(raw: Mapping[str, Any]) -> dict[str, Any]:
    count = raw["num_hidden_layers"]
    kinds = raw["mlp_layer_types"] or ["dense", *["sparse"] * (count - 1)]
    check_each(raw, kinds, "mlp_layer_types")
    layers = frozenset(layer for layer, kind in enumerate(kinds) if kind == "sparse")
    return {**_latent(raw, bool(raw["rope_interleave"])), "moe": _sigmoid(raw, layers)}


def _names(config: ModelConfig) -> TensorNames:
    behind = range(config.num_layers, config.num_layers + PREDICTORS)
    unused = tuple(f"model.layers.{layer}." for layer in behind)
    names = TensorNames(unused=unused, shared_block="shared_experts")
    if config.latent is None:
        return names
    first = "q_a_proj" if config.latent.q_rank else "q_proj"
    return replace(
        names,
        qkv=(f"self_attn.{first}", "self_attn.kv_a_proj_with_mqa"),
        latent=("self_attn.q_b_proj", "self_attn.kv_b_proj"),
        q_norm="self_attn.q_a_layernorm",
        k_norm="self_attn.kv_a_layernorm",
    )


LLAMA4_NAMES = TensorNames(
    up_gate=("feed_forward.up_proj", "feed_forward.gate_proj"),
    down="feed_forward.down_proj",
    sparse="feed_forward",
    routers=("router",),
)
LLAMA4 = {
    **PLAIN, "vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192,
    "intermediate_size_mlp": 16384, "num_hidden_layers": 48, "num_attention_heads": 40,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "num_experts_per_tok": 1, "num_local_experts": 16,
    "moe_layers": None, "interleave_moe_layer_step": 1, "use_qk_norm": True, "no_rope_layers": None,
    "no_rope_layer_interval": 4, "attention_chunk_size": 8192, "layer_types": None,
    "attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1, "attention_bias": False,
}  # fmt: skip


def _llama4(raw: Mapping[str, Any]) -> dict[str, Any]:
    count, interval = raw["num_hidden_layers"], raw["no_rope_layer_interval"]
    rotated = raw["no_rope_layers"] or [int((layer + 1) % interval != 0) for layer in range(count)]
    kinds = raw["layer_types"] or ["chunked_attention" if one else "full_attention" for one in rotated]
    if len(rotated) != count or len(kinds) != count:
        raise ConfigError(
            f"config.json: no_rope_layers and layer_types have {len(rotated)} and {len(kinds)} entries for "
            f"num_hidden_layers {count}"
        )
    chunked = [kind == "chunked_attention" for kind in kinds]
    if chunked != [bool(one) for one in rotated] and any(chunked):
        raise ConfigError("config.json: layer_types other than chunked where rotated are not supported")
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    plain = kind == "longrope" and scaling.get("attention_factor") == 1  # as of a GGUF file
    # Others scale queries and keys, which are normalised later.
    if not plain and kind not in ("default", "linear", "llama3"):
        raise ConfigError(f"config.json: rope scaling {kind!r} is not supported here")
    tuned = raw["attn_temperature_tuning"]
    step, layers, inner = raw["interleave_moe_layer_step"], raw["moe_layers"], raw["intermediate_size"]
    if layers is None:
        layers = range(step - 1, count, step)
    moe = MoeConfig(
        raw["num_local_experts"], raw["num_experts_per_tok"], inner, norm_topk_prob=False,
        layers=frozenset(layers), shared_intermediate_size=inner, shared_gated=False,
        routing=RoutingConfig("top"), transposed=True,
    )  # fmt: skip
    return {
        **read_biases(raw),
        "intermediate_size": raw["intermediate_size_mlp"],
        "rope_interleaved": True,
        "unrotated_layers": frozenset(layer for layer, one in enumerate(rotated) if not one),
        "unrotated_growth": (float(raw["attn_scale"]), int(raw["floor_scale"])) if tuned else None,
        "attention_chunk": raw["attention_chunk_size"] if any(chunked) else None,
        "qk_norm": "plain" if raw["use_qk_norm"] else "",
        "moe": checked_moe(moe),
    }


FAMILIES = {
    "DeepseekV2ForCausalLM": ModelFamily(
        DEEPSEEK2, _deepseek2, _names, aliases={"num_experts": "n_routed_experts"}
    ),
    "DeepseekV3ForCausalLM": ModelFamily(
        DEEPSEEK3,
        lambda raw: {**_latent(raw, bool(raw["rope_interleave"])), "moe": _sigmoid(raw, _after_first(raw))},
        _names,
        aliases=EXPERT_ALIASES,
    ),
    "Glm4MoeForCausalLM": ModelFamily(
        GLM4_MOE,
        lambda raw: {
            "attention_bias": bool(raw["attention_bias"]),
            "qk_norm": "head" if raw["use_qk_norm"] else "",
            "moe": _sigmoid(raw, _after_first(raw)),
        },
        _names,
        aliases=EXPERT_ALIASES,
        rope={"partial": "partial_rotary_factor"},
    ),
    "Glm4MoeLiteForCausalLM": ModelFamily(
        GLM4_LITE, _glm4_lite, _names, aliases={**EXPERT_ALIASES, "head_dim": "qk_rope_head_dim"}
    ),
    "Llama4ForCausalLM": ModelFamily(LLAMA4, _llama4, lambda _: LLAMA4_NAMES),
    "Llama4ForConditionalGeneration": ModelFamily(
        {"text_config": None, "tie_word_embeddings": False},
        _llama4,
        lambda _: text_tower(LLAMA4_NAMES, ("vision_model.",)),
        lambda raw: text_settings(raw, LLAMA4),
    ),
}
