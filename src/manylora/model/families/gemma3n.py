"""Gemma 3n's text model: AltUp and LAuReL, per-layer embeddings, shared keys and values, a sparse gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from manylora.config.blocks import AltUpConfig, LayerInputsConfig
from manylora.errors import ConfigError
from manylora.model.families.common import (
    flat_rope,
    read_activation,
    read_biases,
    read_windows,
    text_settings,
)
from manylora.model.families.family import ModelFamily, text_tower
from manylora.model.families.gemma import GEMMA2, MULTIMODAL

DEFAULTS = {
    "vocab_size": 262400, "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 35,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
    "attention_bias": False, "sliding_window": 512, "layer_types": None, "final_logit_softcapping": 30.0,
    "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256, "altup_active_idx": 0,
    "altup_correct_scale": True, "altup_num_inputs": 4, "num_kv_shared_layers": 15, "laurel_rank": 64,
    "activation_sparsity_pattern": None,
}  # fmt: skip
TOWERS = ("audio_tower.", "embed_vision.", "embed_audio.")  # in addition to the vision tower


def _settings(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replaces the list of MLP sizes, one per layer, with a single size."""
    inner = raw["intermediate_size"]
    if isinstance(inner, Sequence) and inner:
        if len(inner) != raw["num_hidden_layers"] or len(set(inner)) > 1:
            raise ConfigError(
                "config.json: intermediate_size must be the same for each of num_hidden_layers layers, "
                f"got {list(inner)}"
            )
        inner = inner[0]
    return flat_rope({**raw, "intermediate_size": inner})


def _gemma3n(raw: Mapping[str, Any]) -> dict[str, Any]:
    count = raw["num_hidden_layers"]
    windows = read_windows(raw, [(layer + 1) % 5 != 0 for layer in range(count)])
    return {
        **read_shared(raw),
        "sliding_windows": windows,
        "kv_sources": shared_kv(windows, raw["num_kv_shared_layers"]),
        "sparsity": _sparsity(raw["activation_sparsity_pattern"], count),
        "layer_inputs": LayerInputsConfig(
            raw["hidden_size_per_layer_input"], raw["vocab_size_per_layer_input"], count
        ),
        "altup": _altup(raw),
    }


def read_shared(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What Gemma 3n and 4 have in common."""
    return {
        "norm": "rms_wide",
        "embedding_scale": float(raw["hidden_size"]) ** 0.5,
        "activation": read_activation(raw["hidden_activation"]),
        "attention_scale": 1.0,
        "logits_softcap": raw["final_logit_softcapping"],
        "rope_local_theta": float(raw["rope_local_base_freq"]),
        "qk_norm": "head",
        "v_norm": True,
        **read_biases(raw),
    }


def shared_kv(kinds: Sequence[object], shared: int) -> tuple[int, ...]:
    """For each layer, the layer whose keys and values it reads. Each of the last `shared` layers reads those
    of the last earlier layer of the same kind. kinds: one value per layer. Raises ConfigError."""
    first = len(kinds) - shared
    if not 0 < first <= len(kinds):
        raise ConfigError(
            f"config.json: num_kv_shared_layers must be from 0 to {len(kinds) - 1}, got {shared}"
        )
    last = {kind: layer for layer, kind in enumerate(kinds[:first])}
    missing = [layer for layer, kind in enumerate(kinds) if kind not in last]
    if missing:
        raise ConfigError(
            f"config.json: layer {missing[0]} has no layer of its layer_types before the "
            f"{shared} of num_kv_shared_layers whose keys and values it could read"
        )
    return tuple(layer if layer < first else last[kind] for layer, kind in enumerate(kinds)) if shared else ()


def _sparsity(pattern: Sequence[float] | None, count: int) -> tuple[float, ...]:
    """The sparsity of each layer. Without a pattern, the first ten of more than ten layers are sparse."""
    if pattern is None:
        sparse = 10 if count > 10 else 0
        pattern = [0.95] * sparse + [0.0] * (count - sparse)
    if len(pattern) != count or not all(0 <= share < 1 for share in pattern):
        raise ConfigError(
            f"config.json: activation_sparsity_pattern must be {count} numbers from 0 to less than 1, "
            f"got {list(pattern)}"
        )
    return tuple(pattern) if any(pattern) else ()


def _altup(raw: Mapping[str, Any]) -> AltUpConfig:
    streams, active = raw["altup_num_inputs"], raw["altup_active_idx"]
    if not 1 < streams <= raw["num_hidden_layers"] + 1 or not 0 <= active < streams:
        raise ConfigError(
            f"config.json: altup_num_inputs must be from 2 to num_hidden_layers + 1, and altup_active_idx "
            f"less than it, got {streams} and {active}"
        )
    return AltUpConfig(streams, active, bool(raw["altup_correct_scale"]), raw["laurel_rank"])


FAMILIES = {
    "Gemma3nForCausalLM": ModelFamily(DEFAULTS, _gemma3n, lambda _: GEMMA2, _settings),
    "Gemma3nForConditionalGeneration": ModelFamily(
        MULTIMODAL,
        _gemma3n,
        lambda _: text_tower(GEMMA2, TOWERS),
        lambda raw: _settings(text_settings(raw, DEFAULTS)),
    ),
}
