"""gpt-oss: attention sinks, a window in every second layer, experts with biases and a clamped SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manylora.config.model import MoeConfig
from manylora.errors import ConfigError
from manylora.model.families.common import read_biases, read_windows
from manylora.model.families.family import ModelFamily, TensorNames
from manylora.model.families.moe import checked_moe

YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
DEFAULTS = {
    "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "hidden_act": "silu",
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "rope_theta": 150000.0, "sliding_window": 128, "layer_types": None,
    "attention_bias": True, "num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}  # fmt: skip
NAMES = TensorNames(sinks="self_attn.sinks", routers=("router",))


def _gpt_oss(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The experts of a token are weighted by the softmax over their scores alone."""
    count, alpha, limit = raw["num_hidden_layers"], raw["swiglu_alpha"], raw["swiglu_limit"]
    if not limit > 0:
        raise ConfigError(f"config.json: swiglu_limit must be more than 0, got {limit!r}")
    moe = MoeConfig(
        raw["num_local_experts"],
        raw["num_experts_per_tok"],
        raw["intermediate_size"],
        True,
        frozenset(range(count)),
        biased=True,
        interleaved=True,
        swiglu=(float(alpha), float(limit)),
    )
    return {
        **read_biases(raw),
        "norm": "rms_wide",
        "attention_sinks": True,
        "sliding_windows": read_windows(raw, [layer % 2 == 0 for layer in range(count)]),
        "moe": checked_moe(moe),
    }


def _with_yarn(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**raw, "rope_parameters": raw.get("rope_parameters") or YARN}


FAMILIES = {
    "GptOssForCausalLM": ModelFamily(
        DEFAULTS, _gpt_oss, lambda _: NAMES, _with_yarn, aliases={"num_experts": "num_local_experts"}
    )
}
