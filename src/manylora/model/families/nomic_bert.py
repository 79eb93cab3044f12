"""NomicBERT: an encoder with rotary positions and a gated MLP, LayerNorm after each residual sum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manylora.config.blocks import HeadLayerConfig
from manylora.config.model import ModelConfig
from manylora.errors import ConfigError
from manylora.model.families.common import refuse
from manylora.model.families.family import ModelFamily, TensorNames

DEFAULTS = {
    "vocab_size": 30528, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "hidden_act": "silu", "max_position_embeddings": 2048, "type_vocab_size": 2,
    "layer_norm_eps": 1e-12, "rope_theta": 1000.0, "tie_word_embeddings": True,
}  # fmt: skip
# From the names in Nomic's own files to those of transformers.
ALIASES = {
    "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
    "n_inner": "intermediate_size", "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps", "rotary_emb_base": "rope_theta",
}  # fmt: skip
REFUSED = (
    "prenorm", "parallel_block", "qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "use_rms_norm",
    "num_experts",
    "rotary_emb_interleaved", "rotary_emb_scale_base", "scale_attn_by_inverse_layer_idx", "causal",
)  # fmt: skip


def _nomic(raw: Mapping[str, Any]) -> dict[str, Any]:
    refuse(raw, *REFUSED)
    if raw.get("rotary_emb_fraction", 1.0) != 1.0:
        raise ConfigError("config.json: rotary_emb_fraction must be 1.0")
    longest = raw["max_position_embeddings"]
    if raw.get("rotary_scaling_factor"):  # changes the rotation of longer texts, which is not implemented
        longest = min(longest, raw.get("max_trained_positions", longest))
    return {
        "norm": "layer",
        "norm_eps": float(raw["layer_norm_eps"]),
        "post_norm": True,
        "max_position_embeddings": longest,
        "bidirectional": True,
        "token_types": int(raw["type_vocab_size"]),
        "tie_word_embeddings": True,
        "makes_text": False,
        "head_layer": HeadLayerConfig("tanh"),
    }


def _settings(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    if raw.get("activation_function") not in (None, "swiglu"):
        raise ConfigError(
            f"config.json: activation_function {raw['activation_function']!r} is not supported, only swiglu"
        )
    return {**raw, "intermediate_size": raw["intermediate_size"] or 4 * raw["hidden_size"]}


def _names(_: ModelConfig) -> TensorNames:
    return TensorNames(
        roots=("nomic_bert.", "bert."),
        unused=("cls.", "lm_head.", "pooler.", "nomic_bert.pooler.", "bert.pooler."),
        embed="embeddings.word_embeddings",
        head_layer="pooler.dense",
        embedding_norm="emb_ln",
        norm="",
        layers="encoder.layers",
        qkv=("attn.Wqkv",),
        out="attn.out_proj",
        up_gate=("mlp.fc11", "mlp.fc12"),
        down="mlp.fc2",
        block_norms={"attention_norm": "norm1", "mlp_norm": "norm2"},
    )


FAMILIES = {"NomicBertModel": ModelFamily(DEFAULTS, _nomic, _names, _settings, aliases=ALIASES)}
"""Also with heads. transformers writes these names too, though its modules have others."""
