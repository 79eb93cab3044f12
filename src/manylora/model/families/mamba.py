"""Granite 4 and Bamba: Mamba-2 in most layers, attention in the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from manylora.config.blocks import Mamba2Config
from manylora.config.model import ModelConfig
from manylora.errors import ConfigError
from manylora.model.families.common import read_activation, read_biases, recurrent_layers
from manylora.model.families.family import ModelFamily, TensorNames
from manylora.model.families.llama import read_granite
from manylora.model.families.moe import GRANITE_MOE_SHARED, GRANITE_NAMES, granite_experts

KINDS = {"mamba": "linear_attention", "attention": "full_attention"}  # the names in released files
GRANITE = {
    **GRANITE_MOE_SHARED, "shared_intermediate_size": 1024, "position_embedding_type": None,
    "layer_types": None, "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256,
    "mamba_d_head": "auto", "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True,
    "mamba_proj_bias": False, "time_step_limit": (0.0, float("inf")),
}  # fmt: skip
BAMBA = {
    "vocab_size": 128000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": None, "hidden_act": "silu",
    "max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "rope_theta": 10000.0, "attn_layer_indices": None, "attention_bias": False, "mlp_bias": False,
    "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_head": "auto",
    "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False,
    "time_step_limit": (0.0, float("inf")),
}  # fmt: skip
MAMBA = TensorNames(recurrent="mamba", recurrent_in=("in_proj",))
BAMBA_NAMES = replace(
    MAMBA,
    norm="final_layernorm",
    up_gate=("feed_forward.up_proj", "feed_forward.gate_proj"),
    down="feed_forward.down_proj",
    block_norms={"attention_norm": "input_layernorm", "mlp_norm": "pre_ff_layernorm"},
)
SPARSE = replace(GRANITE_NAMES, recurrent="mamba", recurrent_in=("in_proj",))
DENSE = replace(MAMBA, up_gate=GRANITE_NAMES.shared[:1], down=GRANITE_NAMES.shared[1])


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


def _half_rotated(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Bamba rotates half of each head, unless rope_parameters says otherwise."""
    return {**raw, "partial_rotary_factor": 0.5}


def layers_of(raw: Mapping[str, Any], kinds: list[str] | None) -> frozenset[int]:
    """The Mamba layers. kinds: of each layer; None: all are Mamba. Raises ConfigError."""
    count = raw["num_hidden_layers"]
    kinds = ["linear_attention"] * count if kinds is None else [KINDS.get(kind, kind) for kind in kinds]
    return recurrent_layers(raw, kinds)


def read_mamba(
    raw: Mapping[str, Any], layers: frozenset[int], size: int | None = None
) -> Mamba2Config | None:
    """Reads the settings of Mamba layers. Returns None if there are no such layers. size: of all heads
    together; None: the hidden size times `mamba_expand`. Raises ConfigError."""
    if not layers:
        return None
    size = int(raw["mamba_expand"] * raw["hidden_size"]) if size is None else size
    heads, dim = raw["mamba_n_heads"], raw["mamba_d_head"]
    dim = size // heads if dim == "auto" else dim
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
        steps=read_steps(raw["time_step_limit"]),
    )
    if heads * dim != size:
        raise ConfigError(f"config.json: mamba_n_heads {heads} times mamba_d_head {dim} must be {size}")
    return checked_mamba(mamba, raw["hidden_act"])


def read_steps(limits: Any) -> tuple[float, float]:
    """The smallest and the largest step. As JSON has no infinity, transformers writes it as
    {"__float__": "Infinity"}."""
    given = (0.0, float("inf")) if limits is None else limits
    least, most = (float(one["__float__"] if isinstance(one, Mapping) else one) for one in given)
    return least, most


def checked_mamba(mamba: Mamba2Config, activation: str) -> Mamba2Config:
    """Returns `mamba` if it is supported. activation: of the convolution. Raises ConfigError."""
    if read_activation(activation) != "silu":
        raise ConfigError(f"config.json: Mamba with {activation!r} is not supported; with silu it is")
    sizes = (mamba.heads, mamba.groups, mamba.head_dim, mamba.state_dim)
    if min(sizes) < 1 or mamba.taps < 2 or mamba.heads % mamba.groups:
        raise ConfigError(
            "config.json: the number of Mamba's heads must be a multiple of its groups, and its convolution "
            f"must see 2 inputs at least, got {mamba.heads}, {mamba.groups} and {mamba.taps}"
        )
    return mamba


def _names(config: ModelConfig) -> TensorNames:
    return DENSE if config.moe is None else SPARSE


FAMILIES = {
    "GraniteMoeHybridForCausalLM": ModelFamily(
        GRANITE, _granite, _names, aliases={"layers_block_type": "layer_types"}
    ),
    "BambaForCausalLM": ModelFamily(
        BAMBA, _bamba, lambda _: BAMBA_NAMES, _half_rotated, rope={"partial": "partial_rotary_factor"}
    ),
}
