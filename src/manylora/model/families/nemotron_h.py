"""Nemotron-H: each layer is one norm followed by Mamba-2, attention, an MLP or experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manylora.config.blocks import Mamba2Config, RoutingConfig
from manylora.config.model import MoeConfig
from manylora.errors import ConfigError
from manylora.model.families.common import refuse
from manylora.model.families.family import ModelFamily, TensorNames
from manylora.model.families.mamba import checked_mamba
from manylora.model.families.moe import checked_moe

NEMOTRON_H = {
    "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 21504, "num_hidden_layers": None,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "mlp_hidden_act": "relu2",
    "max_position_embeddings": 4096, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": False,
    "attention_bias": False, "mlp_bias": False, "use_bias": False, "layers_block_type": None,
    "hybrid_override_pattern": None, "sliding_window": None, "ssm_state_size": 128, "mamba_num_heads": 128,
    "mamba_head_dim": 64, "mamba_hidden_act": "silu", "n_groups": 8, "conv_kernel": 4, "use_conv_bias": True,
    "time_step_min": 0.001, "n_routed_experts": 8, "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688, "moe_latent_size": None, "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
}  # fmt: skip
ALIASES = {
    "layer_types": "layers_block_type", "num_local_experts": "n_routed_experts", "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel", "mamba_dt_min": "time_step_min", "mamba_conv_bias": "use_conv_bias",
}  # fmt: skip
LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
OLD = {"mamba": "linear_attention", "attention": "full_attention"}
DEFAULT = ["linear_attention", "moe", "full_attention", "mlp"]
NAMES = TensorNames(
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


def _renamed(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the kinds of the layers, which also determine their number."""
    kinds, pattern = raw["layers_block_type"], raw["hybrid_override_pattern"]
    if kinds is None and pattern is not None:
        kinds = [LETTERS.get(letter, letter) for letter in pattern]
    kinds = [OLD.get(kind, kind) for kind in kinds or DEFAULT]
    unknown = set(kinds) - set(LETTERS.values())
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
        for kind in LETTERS.values()
    }
    mixed = layers["linear_attention"] | layers["full_attention"]
    every = frozenset(range(raw["num_hidden_layers"]))
    return {
        "mlp_bias": bool(raw["mlp_bias"]),
        "gated_mlp": False,
        "unrotated_layers": every,
        "unmixed_layers": every - mixed,
        "mlpless_layers": mixed,
        "recurrent": _mamba(raw, layers["linear_attention"]),
        "moe": _experts(raw, layers["moe"]),
    }


def _mamba(raw: Mapping[str, Any], layers: frozenset[int]) -> Mamba2Config | None:
    if not layers:
        return None
    mamba = Mamba2Config(
        layers,
        raw["mamba_num_heads"],
        raw["n_groups"],
        raw["mamba_head_dim"],
        raw["ssm_state_size"],
        raw["conv_kernel"],
        conv_bias=bool(raw["use_conv_bias"]),
        biased=bool(raw["use_bias"]),
        out_biased=bool(raw["use_bias"]),
        steps=(float(raw["time_step_min"]), float("inf")),
    )
    return checked_mamba(mamba, raw["mamba_hidden_act"])


def _experts(raw: Mapping[str, Any], layers: frozenset[int]) -> MoeConfig | None:
    if not layers:
        return None
    refuse(raw, "mlp_bias")
    routing = RoutingConfig(
        "sigmoid", True, raw["n_group"], raw["topk_group"], 2, added=1e-20,
        scale=float(raw["routed_scaling_factor"]), wide=True,
    )  # fmt: skip
    return checked_moe(
        MoeConfig(
            raw["n_routed_experts"], raw["num_experts_per_tok"], raw["moe_intermediate_size"],
            bool(raw["norm_topk_prob"]), layers, raw["moe_shared_expert_intermediate_size"],
            shared_gated=False, routing=routing, gated=False, latent_size=raw["moe_latent_size"] or 0,
        )
    )  # fmt: skip


FAMILIES = {
    "NemotronHForCausalLM": ModelFamily(NEMOTRON_H, _nemotron_h, lambda _: NAMES, _renamed, aliases=ALIASES)
}
