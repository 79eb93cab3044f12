"""ModernBERT: an encoder with rotary positions, windows in most layers, and a gated MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manylora.config.blocks import HeadLayerConfig
from manylora.config.model import ModelConfig
from manylora.errors import ConfigError
from manylora.model.families.common import flat_rope, read_activation, read_windows
from manylora.model.families.family import ModelFamily, TensorNames

DEFAULTS = {
    "vocab_size": 50368, "hidden_size": 768, "intermediate_size": 1152, "num_hidden_layers": 22,
    "num_attention_heads": 12, "hidden_activation": "gelu", "max_position_embeddings": 8192,
    "norm_eps": 1e-5, "norm_bias": False, "attention_bias": False, "mlp_bias": False, "layer_types": None,
    "rope_theta": 160000.0, "rope_local_base_freq": 10000.0, "local_attention": 128,
    "classifier_bias": False, "classifier_activation": "gelu",
    "tie_word_embeddings": True,
}  # fmt: skip


def _modernbert(raw: Mapping[str, Any]) -> dict[str, Any]:
    every = raw.get("global_attn_every_n_layers", 3)
    windowed = [bool(layer % every) for layer in range(raw["num_hidden_layers"])]
    activation = read_activation(raw["classifier_activation"])
    return {
        "norm": "layer",
        "norm_eps": float(raw["norm_eps"]),
        "norm_bias": bool(raw["norm_bias"]),
        "first_norm": False,
        "activation": read_activation(raw["hidden_activation"]),
        **dict.fromkeys(("attention_bias", "attention_out_bias"), bool(raw["attention_bias"])),
        "mlp_bias": bool(raw["mlp_bias"]),
        "sliding_windows": read_windows(raw, windowed),
        "rope_local_theta": float(raw["rope_local_base_freq"]),
        "bidirectional": True,
        "makes_text": False,
        "tie_word_embeddings": True,
        "head_layer": HeadLayerConfig(activation, bool(raw["classifier_bias"]), norm=True, each=True),
    }


def _settings(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Converts the two rotary bases to Gemma 3's names. Converts the window, which counts both sides, to the
    tokens on one side plus the token itself."""
    if raw.get("rope_scaling"):
        raise ConfigError("config.json: rope_scaling is not supported for ModernBERT")
    return flat_rope(
        {
            **raw,
            "rope_theta": raw.get("global_rope_theta", raw["rope_theta"]),
            "rope_local_base_freq": raw.get("local_rope_theta", raw["rope_local_base_freq"]),
            "sliding_window": raw["local_attention"] // 2 + 1,
        }
    )


def _names(_: ModelConfig) -> TensorNames:
    return TensorNames(
        unused=("decoder.", "head."),
        embed="embeddings.tok_embeddings",
        embedding_norm="embeddings.norm",
        norm="final_norm",
        head_layer="head.dense",
        head_norm="head.norm",
        qkv=("attn.Wqkv",),
        out="attn.Wo",
        up_gate=("mlp.Wi",),
        down="mlp.Wo",
        block_norms={"attention_norm": "attn_norm", "mlp_norm": "mlp_norm"},
    )


FAMILIES = {"ModernBertModel": ModelFamily(DEFAULTS, _modernbert, _names, _settings)}
"""Also with heads, such as ModernBertForSequenceClassification."""
