"""Falcon-H1: attention and Mamba-2 in parallel in each layer, and multipliers for many parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from manylora.config.blocks import BesideConfig
from manylora.errors import ConfigError
from manylora.model.families.common import read_biases
from manylora.model.families.family import ModelFamily
from manylora.model.families.mamba import BAMBA_NAMES, read_mamba

FALCON_H1 = {
    "vocab_size": 128000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": None, "hidden_act": "silu",
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "rope_theta": 10000.0, "attention_bias": False, "mlp_bias": False, "projectors_bias": False,
    "mamba_d_ssm": 1024, "mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_n_groups": 1,
    "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True,
    "mamba_proj_bias": False, "mamba_norm_before_gate": True, "mamba_rms_norm": False,
    "time_step_limit": (0.0, float("inf")), "lm_head_multiplier": 1.0, "embedding_multiplier": 1.0,
    "mlp_multipliers": None, "key_multiplier": 1.0, "attention_out_multiplier": 1.0,
    "attention_in_multiplier": 1.0, "ssm_multipliers": None, "ssm_in_multiplier": 1.0,
    "ssm_out_multiplier": 1.0,
}  # fmt: skip

MULTIPLIED = (
    "adapters cannot be served on this GGUF file of Falcon-H1: its weights were multiplied by the model's "
    "multipliers, which it lacks: serve the original model, a folder with model.safetensors"
)


def _falcon_h1(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the config. The multiplier of keys becomes part of the attention scale."""
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


FAMILIES = {"FalconH1ForCausalLM": ModelFamily(FALCON_H1, _falcon_h1, lambda _: BAMBA_NAMES)}
