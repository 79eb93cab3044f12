"""BERT and its relatives: encoders with bidirectional attention, LayerNorm after each residual sum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from manylora.config.blocks import HeadLayerConfig
from manylora.config.model import ModelConfig
from manylora.errors import ConfigError
from manylora.model.families.common import read_activation, refuse
from manylora.model.families.family import ModelFamily, TensorNames

BERT = {
    "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "hidden_act": "gelu", "max_position_embeddings": 512, "type_vocab_size": 2,
    "layer_norm_eps": 1e-12, "tie_word_embeddings": True, "pad_token_id": 0,
}  # fmt: skip
ROBERTA = {**BERT, "vocab_size": 50265, "pad_token_id": 1}
XLM_ROBERTA = {**ROBERTA, "vocab_size": 30522}
CAMEMBERT = {**ROBERTA, "vocab_size": 30522}
MPNET = {
    **{name: value for name, value in BERT.items() if name != "type_vocab_size"},
    "vocab_size": 30527, "pad_token_id": 1, "relative_attention_num_buckets": 32,
}  # fmt: skip
ELECTRA = {
    **BERT, "embedding_size": 128, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024,
}  # fmt: skip
DISTILBERT = {
    "vocab_size": 30522, "dim": 768, "n_layers": 6, "n_heads": 12, "hidden_dim": 3072, "activation": "gelu",
    "max_position_embeddings": 512, "sinusoidal_pos_embds": False, "tie_word_embeddings": True,
}  # fmt: skip
DISTILBERT_ALIASES = {
    "hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers",
}  # fmt: skip
BUCKETS = 32  # of MPNet's relative positions; transformers computes this many, whatever the table has
UNUSED = (
    "cls.", "lm_head.", "pooler.", "bert.pooler.", "roberta.pooler.", "mpnet.pooler.", "qa_outputs.",
    "discriminator_predictions.", "generator_predictions.", "generator_lm_head.", "vocab_transform.",
    "vocab_layer_norm.", "vocab_projector.",
)  # fmt: skip


def _bert(raw: Mapping[str, Any]) -> dict[str, Any]:
    refuse(raw, "is_decoder", "add_cross_attention")
    kind = raw.get("position_embedding_type") or "absolute"
    if kind != "absolute":
        raise ConfigError(f"config.json: position_embedding_type {kind!r} is not supported, only absolute")
    return {
        "norm": "layer",
        "norm_eps": float(raw["layer_norm_eps"]),
        "learned_positions": True,
        "post_norm": True,
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


def _mpnet(raw: Mapping[str, Any]) -> dict[str, Any]:
    if raw["relative_attention_num_buckets"] != BUCKETS:
        raise ConfigError(f"config.json: relative_attention_num_buckets must be {BUCKETS} for MPNet")
    settings = {**raw, "type_vocab_size": 0, "pad_token_id": 1}  # of positions: whatever config.json says
    return {**_roberta(settings), "relative_buckets": BUCKETS}


def _electra(raw: Mapping[str, Any]) -> dict[str, Any]:
    size = raw["embedding_size"]
    return {
        **_bert(raw),
        "projected_size": None if size == raw["hidden_size"] else int(size),
        "head_layer": None,
        "head_dense_activation": "gelu",
    }


def _distilbert(raw: Mapping[str, Any]) -> dict[str, Any]:
    settings = {**raw, "type_vocab_size": 0, "layer_norm_eps": 1e-12}
    activation = read_activation(raw["activation"])
    return {
        **_bert(settings),
        "activation": activation,
        "head_layer": HeadLayerConfig("relu"),
        "head_dense_activation": "relu",
    }


def _distilbert_sizes(raw: Mapping[str, Any]) -> dict[str, Any]:
    sizes = {
        "hidden_size": raw["dim"],
        "num_hidden_layers": raw["n_layers"],
        "num_attention_heads": raw["n_heads"],
        "intermediate_size": raw["hidden_dim"],
    }
    return {**raw, **sizes}


def _names(_: ModelConfig) -> TensorNames:
    return TensorNames(
        roots=("bert.", "roberta.", "mpnet.", "electra.", "distilbert."),
        unused=UNUSED,
        embed="embeddings.word_embeddings",
        head_layer="pooler.dense",
        positions="embeddings.position_embeddings",
        embedding_norm="embeddings.LayerNorm",
        project="embeddings_project",
        norm="",
        layers="encoder.layer",
        qkv=tuple(f"attention.self.{name}" for name in ("query", "key", "value")),
        out="attention.output.dense",
        up_gate=("intermediate.dense",),
        down="output.dense",
        block_norms={"attention_norm": "attention.output.LayerNorm", "mlp_norm": "output.LayerNorm"},
    )


def _mpnet_names(config: ModelConfig) -> TensorNames:
    return replace(
        _names(config),
        relative="encoder.relative_attention_bias",
        qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        out="attention.attn.o",
        block_norms={"attention_norm": "attention.LayerNorm", "mlp_norm": "output.LayerNorm"},
    )


def _distilbert_names(config: ModelConfig) -> TensorNames:
    return replace(
        _names(config),
        head_layer="pre_classifier",
        layers="transformer.layer",
        qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        out="attention.out_lin",
        up_gate=("ffn.lin1",),
        down="ffn.lin2",
        block_norms={"attention_norm": "sa_layer_norm", "mlp_norm": "output_layer_norm"},
    )


FAMILIES = {
    "BertModel": ModelFamily(BERT, _bert, _names),
    "RobertaModel": ModelFamily(ROBERTA, _roberta, _names),
    "XLMRobertaModel": ModelFamily(XLM_ROBERTA, _roberta, _names),
    "CamembertModel": ModelFamily(CAMEMBERT, _roberta, _names),
    "MPNetModel": ModelFamily(MPNET, _mpnet, _mpnet_names),
    "ElectraModel": ModelFamily(ELECTRA, _electra, _names),
    "DistilBertModel": ModelFamily(
        DISTILBERT, _distilbert, _distilbert_names, _distilbert_sizes, aliases=DISTILBERT_ALIASES
    ),
}
"""Also with heads, such as BertForSequenceClassification."""
