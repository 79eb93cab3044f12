"""Models with Mamba-2 layers: Granite 4, Bamba, Nemotron-H, and Falcon-H1, beside its attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from manylora.config.blocks import BesideConfig, Mamba2Config, RoutingConfig
from manylora.config.model import MoeConfig
from manylora.errors import ConfigError
from manylora.model.families.common import read_activation, read_biases, recurrent_layers, refuse
from manylora.model.families.family import ModelFamily, TensorNames
from manylora.model.families.llama import LLAMA, read_granite
from manylora.model.families.moe import GRANITE_MOE_SHARED, GRANITE_NAMES, checked_moe, granite_experts

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
