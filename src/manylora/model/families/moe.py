"""Mixtures of experts: like Llama, with a router and many small MLPs in place of one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manylora.config.engine import MoeConfig
from manylora.errors import ConfigError
from manylora.model.families.common import read_biases, read_windows
from manylora.model.families.family import ModelFamily, TensorNames

MIXTRAL = TensorNames(sparse="block_sparse_moe", expert_up_gate=("w3", "w1"), expert_down="w2")


def _mixtral(raw: Mapping[str, Any]) -> dict[str, Any]:
    layers = frozenset(range(raw["num_hidden_layers"]))
    moe = MoeConfig(
        raw["num_local_experts"], raw["num_experts_per_tok"], raw["intermediate_size"], True, layers
    )
    return {"sliding_windows": read_windows(raw), "moe": _checked(moe)}


def _qwen2_moe(raw: Mapping[str, Any]) -> dict[str, Any]:
    windows: tuple[int | None, ...] = ()
    if raw.get("use_sliding_window", False):
        first = raw.get("max_window_layers", 28)
        marked = [layer % 2 == 0 and layer < first for layer in range(raw["num_hidden_layers"])]
        windows = read_windows(raw, marked)
    moe = _qwen_experts(raw, raw["shared_expert_intermediate_size"])
    return {"attention_bias": bool(raw.get("qkv_bias", True)), "sliding_windows": windows, "moe": moe}


def _qwen3_moe(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **read_biases(raw),
        "qk_norm": "head",
        "sliding_windows": read_windows(raw) if raw.get("use_sliding_window", False) else (),
        "moe": _qwen_experts(raw),
    }


def _qwen_experts(raw: Mapping[str, Any], shared: int = 0) -> MoeConfig | None:
    """Every `decoder_sparse_step`-th layer has experts, except those in `mlp_only_layers`."""
    count = raw["num_experts"] if "num_experts" in raw else raw["num_local_experts"]
    step, plain = raw.get("decoder_sparse_step", 1), raw.get("mlp_only_layers") or ()
    if step < 1:
        raise ConfigError(f"config.json: decoder_sparse_step must be at least 1, got {step}")
    numbers = range(raw["num_hidden_layers"])
    layers = frozenset(i for i in numbers if count > 0 and i not in plain and (i + 1) % step == 0)
    if not layers:
        return None
    normalised = bool(raw.get("norm_topk_prob", False))
    top_k, inner = raw["num_experts_per_tok"], raw["moe_intermediate_size"]
    return _checked(MoeConfig(count, top_k, inner, normalised, layers, shared))


def _checked(moe: MoeConfig) -> MoeConfig:
    if not 1 <= moe.top_k <= moe.num_experts:
        raise ConfigError(
            f"config.json: num_experts_per_tok must be 1 to the number of experts ({moe.num_experts}), "
            f"got {moe.top_k}"
        )
    return moe


FAMILIES = {
    "MixtralForCausalLM": ModelFamily(_mixtral, lambda _: MIXTRAL),
    "Qwen2MoeForCausalLM": ModelFamily(_qwen2_moe),
    "Qwen3MoeForCausalLM": ModelFamily(_qwen3_moe),
}
