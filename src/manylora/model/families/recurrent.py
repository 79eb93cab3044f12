"""Models with recurrent layers: Qwen3-Next, Qwen3.5 and 3.6 (gated delta rules, gated attention), LFM2 (short
convolutions), and those with Mamba-2: Granite 4, Bamba, Nemotron-H, and Falcon-H1, beside its attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from manylora.config.blocks import BesideConfig, ConvConfig, DeltaConfig, Mamba2Config, RoutingConfig
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
from manylora.model.families.llama import LLAMA, PLAIN, read_granite
from manylora.model.families.moe import (
    GRANITE_MOE_SHARED,
    GRANITE_NAMES,
    checked_moe,
    granite_experts,
    qwen_experts,
)

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


KINDS = {"mamba": "linear_attention", "attention": "full_attention"}  # the names in released files
MAMBA_SIZES = {
    "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_head": "auto",
    "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False,
    "time_step_limit": (0.0, float("inf")),
}  # fmt: skip
GRANITE_HYBRID = {
    **GRANITE_MOE_SHARED, **MAMBA_SIZES, "shared_intermediate_size": 1024, "position_embedding_type": None,
    "layer_types": None,
}  # fmt: skip
BAMBA = {
    **LLAMA, **MAMBA_SIZES, "vocab_size": 128000, "intermediate_size": 14336, "num_key_value_heads": 8,
    "max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "attn_layer_indices": None,
}  # fmt: skip
MAMBA = TensorNames(recurrent="mamba", recurrent_in=("in_proj",))
BAMBA_NAMES = replace(
    MAMBA,
    norm="final_layernorm",
    up_gate=("feed_forward.up_proj", "feed_forward.gate_proj"),
    down="feed_forward.down_proj",
    block_norms={"attention_norm": "input_layernorm", "mlp_norm": "pre_ff_layernorm"},
)
HYBRID_MOE_NAMES = replace(GRANITE_NAMES, recurrent="mamba", recurrent_in=("in_proj",))
HYBRID_NAMES = replace(MAMBA, up_gate=GRANITE_NAMES.shared[:1], down=GRANITE_NAMES.shared[1])


def _granite(raw: Mapping[str, Any]) -> dict[str, Any]:
    """If there are no experts, the shared expert is a plain MLP."""
    count, kind = raw["num_hidden_layers"], raw["position_embedding_type"]
    if kind not in (None, "rope", "nope"):
        raise ConfigError(
            f"config.json: position_embedding_type {kind!r} is not supported; rope and null are"
        )
    sparse = bool(raw["num_local_experts"])
    return {
        **read_granite(raw),
        **read_biases(raw),
        "moe": granite_experts(raw) if sparse else None,
        "intermediate_size": raw["intermediate_size" if sparse else "shared_intermediate_size"],
        "unrotated_layers": frozenset() if kind == "rope" else frozenset(range(count)),
        "recurrent": read_mamba(raw, layers_of(raw, raw["layer_types"])),
    }


def _bamba(raw: Mapping[str, Any]) -> dict[str, Any]:
    attended = raw["attn_layer_indices"] or ()
    kinds = [
        "full_attention" if layer in attended else "linear_attention"
        for layer in range(raw["num_hidden_layers"])
    ]
    return {
        **read_biases(raw),
        "mlp_bias": bool(raw["mlp_bias"]),
        "recurrent": read_mamba(raw, layers_of(raw, kinds)),
    }


def layers_of(raw: Mapping[str, Any], kinds: list[str] | None) -> frozenset[int]:
    """The Mamba layers. kinds: of each layer; None: all are Mamba. Raises ConfigError."""
    count = raw["num_hidden_layers"]
    kinds = ["linear_attention"] * count if kinds is None else [KINDS.get(kind, kind) for kind in kinds]
    return recurrent_layers(raw, kinds)


def read_mamba(
    raw: Mapping[str, Any], layers: frozenset[int], size: int | None = None
) -> Mamba2Config | None:
    """None if there are no such layers. size: of all heads; None: hidden size times `mamba_expand`."""
    if not layers:
        return None
    size = int(raw["mamba_expand"] * raw["hidden_size"]) if size is None else size
    heads, dim = raw["mamba_n_heads"], raw["mamba_d_head"]
    dim = size // heads if dim == "auto" else dim
    # As JSON has no infinity, transformers writes it as {"__float__": "Infinity"}.
    limits = raw["time_step_limit"] or (0.0, float("inf"))
    least, most = (float(one["__float__"] if isinstance(one, Mapping) else one) for one in limits)
    mamba = Mamba2Config(
        layers,
        heads,
        raw["mamba_n_groups"],
        dim,
        raw["mamba_d_state"],
        raw["mamba_d_conv"],
        conv_bias=bool(raw["mamba_conv_bias"]),
        biased=bool(raw["mamba_proj_bias"]),
        out_biased=bool(raw["mamba_proj_bias"]),
        steps=(least, most),
    )
    if heads * dim != size:
        raise ConfigError(f"config.json: mamba_n_heads {heads} times mamba_d_head {dim} must be {size}")
    if read_activation(raw["hidden_act"]) != "silu":
        raise ConfigError(f"config.json: Mamba with {raw['hidden_act']!r} is not supported; with silu it is")
    sizes = (mamba.heads, mamba.groups, mamba.head_dim, mamba.state_dim)
    if min(sizes) < 1 or mamba.taps < 2 or mamba.heads % mamba.groups:
        raise ConfigError(
            "config.json: the number of Mamba's heads must be a multiple of its groups, and its convolution "
            f"must see 2 inputs at least, got {mamba.heads}, {mamba.groups} and {mamba.taps}"
        )
    return mamba


NEMOTRON_H = {
    **LLAMA, "vocab_size": 131072, "intermediate_size": 21504, "num_key_value_heads": 8, "head_dim": 128,
    "mlp_hidden_act": "relu2", "max_position_embeddings": 4096, "layer_norm_epsilon": 1e-5,
    "use_bias": False, "layers_block_type": None,
    "hybrid_override_pattern": None, "sliding_window": None, "ssm_state_size": 128, "mamba_num_heads": 128,
    "mamba_head_dim": 64, "mamba_hidden_act": "silu", "n_groups": 8, "conv_kernel": 4, "use_conv_bias": True,
    "time_step_min": 0.001, "n_routed_experts": 8, "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688, "moe_latent_size": None, "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
}  # fmt: skip
NEMOTRON_H_ALIASES = {
    "layer_types": "layers_block_type", "num_local_experts": "n_routed_experts", "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel", "mamba_dt_min": "time_step_min", "mamba_conv_bias": "use_conv_bias",
}  # fmt: skip
# Their names in other families.
MAMBA_NAMES = {
    "mamba_num_heads": "mamba_n_heads", "mamba_head_dim": "mamba_d_head", "n_groups": "mamba_n_groups",
    "ssm_state_size": "mamba_d_state", "conv_kernel": "mamba_d_conv", "use_conv_bias": "mamba_conv_bias",
    "use_bias": "mamba_proj_bias", "mamba_hidden_act": "hidden_act",
}  # fmt: skip
LAYER_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
DEFAULT_LAYER_TYPES = ["linear_attention", "moe", "full_attention", "mlp"]
NEMOTRON_H_NAMES = TensorNames(
    roots=("model.", "backbone."),
    unused=("mtp.",),
    embed="embeddings",
    norm="norm_f",
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    out="mixer.o_proj",
    recurrent="mixer",
    recurrent_in=("in_proj",),
    up_gate=("mixer.up_proj",),
    down="mixer.down_proj",
    sparse="mixer",
    shared_block="shared_experts",
    block_norms={"attention_norm": "norm", "mlp_norm": "norm"},
)


def _nemotron_h_settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    kinds, pattern = raw["layers_block_type"], raw["hybrid_override_pattern"]
    if kinds is None and pattern is not None:
        kinds = [LAYER_LETTERS.get(letter, letter) for letter in pattern]
    kinds = [KINDS.get(kind, kind) for kind in kinds or DEFAULT_LAYER_TYPES]
    unknown = set(kinds) - set(LAYER_LETTERS.values())
    if unknown:
        raise ConfigError(f"config.json: layers_block_type has {min(unknown)!r}, which is not supported here")
    if "full_attention" not in kinds:
        raise ConfigError("config.json: layers_block_type must have full_attention in one layer at least")
    return {
        **raw,
        "layers_block_type": kinds,
        "num_hidden_layers": len(kinds),
        "hidden_act": raw["mlp_hidden_act"],
        "rms_norm_eps": raw["layer_norm_epsilon"],
    }


def _nemotron_h(raw: Mapping[str, Any]) -> dict[str, Any]:
    refuse(raw, "sliding_window")
    layers: dict[str, frozenset[int]] = {
        kind: frozenset(number for number, one in enumerate(raw["layers_block_type"]) if one == kind)
        for kind in LAYER_LETTERS.values()
    }
    mixed = layers["linear_attention"] | layers["full_attention"]
    every = frozenset(range(raw["num_hidden_layers"]))
    sizes = {ours: raw[theirs] for theirs, ours in MAMBA_NAMES.items()}
    sizes["time_step_limit"] = raw["time_step_min"], float("inf")
    mamba = read_mamba(sizes, layers["linear_attention"], raw["mamba_num_heads"] * raw["mamba_head_dim"])
    moe = None
    if layers["moe"]:
        refuse(raw, "mlp_bias")
        routing = RoutingConfig(
            "sigmoid", True, raw["n_group"], raw["topk_group"], 2, added=1e-20,
            scale=float(raw["routed_scaling_factor"]), wide=True,
        )  # fmt: skip
        moe = MoeConfig(
            raw["n_routed_experts"], raw["num_experts_per_tok"], raw["moe_intermediate_size"],
            bool(raw["norm_topk_prob"]), layers["moe"], raw["moe_shared_expert_intermediate_size"],
            shared_gated=False, routing=routing, gated=False, latent_size=raw["moe_latent_size"] or 0,
        )  # fmt: skip
        moe = checked_moe(moe)
    return {
        "mlp_bias": bool(raw["mlp_bias"]),
        "gated_mlp": False,
        "unrotated_layers": every,
        "unmixed_layers": every - mixed,
        "mlpless_layers": mixed,
        "recurrent": mamba,
        "moe": moe,
    }


FALCON_H1 = {
    **LLAMA, **MAMBA_SIZES, "vocab_size": 128000, "intermediate_size": 14336, "num_key_value_heads": 8,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "projectors_bias": False, "mamba_d_ssm": 1024,
    "mamba_norm_before_gate": True, "mamba_rms_norm": False, "lm_head_multiplier": 1.0,
    "embedding_multiplier": 1.0, "mlp_multipliers": None, "key_multiplier": 1.0,
    "attention_out_multiplier": 1.0, "attention_in_multiplier": 1.0, "ssm_multipliers": None,
    "ssm_in_multiplier": 1.0, "ssm_out_multiplier": 1.0,
}  # fmt: skip

MULTIPLIED = (
    "adapters cannot be served on this GGUF file of Falcon-H1: its weights were multiplied by the model's "
    "multipliers, which it lacks: serve the original model, a folder with model.safetensors"
)


def _falcon_h1(raw: Mapping[str, Any]) -> dict[str, Any]:
    mamba = read_mamba(raw, frozenset(range(raw["num_hidden_layers"])), raw["mamba_d_ssm"])
    assert mamba is not None, "every layer has one"
    gate, down = _numbers(raw, "mlp_multipliers", 2)
    head_dim = raw["head_dim"] or raw["hidden_size"] // raw["num_attention_heads"]
    return {
        "no_adapters": MULTIPLIED if raw.get("multiplied_weights") else "",
        **read_biases(raw),
        "mlp_bias": bool(raw["mlp_bias"]),
        "attention_scale": head_dim**-0.5 * float(raw["key_multiplier"]),
        "embedding_scale": float(raw["embedding_multiplier"]),
        "logits_scale": float(raw["lm_head_multiplier"]),
        "mlp_scales": (gate, down),
        "recurrent": replace(
            mamba,
            out_biased=bool(raw["projectors_bias"]),
            normed=bool(raw["mamba_rms_norm"]),
            gate_first=not raw["mamba_norm_before_gate"],
            scales=_numbers(raw, "ssm_multipliers", 5),
        ),
        "beside": BesideConfig(
            float(raw["attention_in_multiplier"]),
            float(raw["attention_out_multiplier"]),
            float(raw["ssm_in_multiplier"]),
            float(raw["ssm_out_multiplier"]),
        ),
    }


def _numbers(raw: Mapping[str, Any], name: str, count: int) -> tuple[float, ...]:
    given = raw[name]
    numbers = (1.0,) * count if given is None else tuple(float(one) for one in given)
    if len(numbers) != count:
        raise ConfigError(f"config.json: {name} must have {count} numbers, got {len(numbers)}")
    return numbers


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
    "GraniteMoeHybridForCausalLM": ModelFamily(
        GRANITE_HYBRID,
        _granite,
        lambda config: HYBRID_NAMES if config.moe is None else HYBRID_MOE_NAMES,
        aliases={"layers_block_type": "layer_types"},
    ),
    "BambaForCausalLM": ModelFamily(
        BAMBA,
        _bamba,
        lambda _: BAMBA_NAMES,
        lambda raw: {**raw, "partial_rotary_factor": 0.5},  # unless rope_parameters has another
        rope={"partial": "partial_rotary_factor"},
    ),
    "NemotronHForCausalLM": ModelFamily(
        NEMOTRON_H, _nemotron_h, lambda _: NEMOTRON_H_NAMES, _nemotron_h_settings, aliases=NEMOTRON_H_ALIASES
    ),
    "FalconH1ForCausalLM": ModelFamily(FALCON_H1, _falcon_h1, lambda _: BAMBA_NAMES),
}
