"""BERT, RoBERTa and XLM-RoBERTa: encoders with bidirectional attention, LayerNorm after each residual sum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manylora.config.blocks import HeadLayerConfig
from manylora.config.model import ModelConfig
from manylora.errors import ConfigError
from manylora.model.families.common import refuse
from manylora.model.families.family import ModelFamily, TensorNames

BERT = {
    "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "hidden_act": "gelu", "max_position_embeddings": 512, "type_vocab_size": 2,
    "layer_norm_eps": 1e-12, "tie_word_embeddings": True, "pad_token_id": 0,
}  # fmt: skip
ROBERTA = {**BERT, "vocab_size": 50265, "pad_token_id": 1}
XLM_ROBERTA = {**ROBERTA, "vocab_size": 30522}
UNUSED = ("cls.", "lm_head.", "pooler.", "bert.pooler.", "roberta.pooler.")


def _bert(raw: Mapping[str, Any]) -> dict[str, Any]:
    refuse(raw, "is_decoder", "add_cross_attention")
    kind = raw.get("position_embedding_type") or "absolute"
    if kind != "absolute":
        raise ConfigError(f"config.json: position_embedding_type {kind!r} is not supported, only absolute")
    return {
        "norm": "layer",
        "norm_eps": float(raw["layer_norm_eps"]),
        "learned_positions": True,
        "gated_mlp": False,
        **dict.fromkeys(("attention_bias", "attention_out_bias", "mlp_bias", "bidirectional"), True),
        "token_types": int(raw["type_vocab_size"]),
        "tie_word_embeddings": True,
        "makes_text": False,
        "head_layer": HeadLayerConfig("tanh"),
    }


def _roberta(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Positions start after the padding id. RoBERTa's own classification head has two layers."""
    padding = int(raw["pad_token_id"])
    return {
        **_bert(raw),
        "position_offset": padding,
        "padding_id": padding,
        "max_position_embeddings": raw["max_position_embeddings"] - padding - 1,
        "head_layer": None,
    }


def _names(_: ModelConfig) -> TensorNames:
    return TensorNames(
        roots=("bert.", "roberta."),
        unused=UNUSED,
        embed="embeddings.word_embeddings",
        head_layer="pooler.dense",
        positions="embeddings.position_embeddings",
        embedding_norm="embeddings.LayerNorm",
        norm="",
        layers="encoder.layer",
        qkv=tuple(f"attention.self.{name}" for name in ("query", "key", "value")),
        out="attention.output.dense",
        up_gate=("intermediate.dense",),
        down="output.dense",
        block_norms={"attention_norm": "attention.output.LayerNorm", "mlp_norm": "output.LayerNorm"},
    )


FAMILIES = {
    "BertModel": ModelFamily(BERT, _bert, _names),
    "RobertaModel": ModelFamily(ROBERTA, _roberta, _names),
    "XLMRobertaModel": ModelFamily(XLM_ROBERTA, _roberta, _names),
}
"""Also with heads, such as BertForSequenceClassification."""
