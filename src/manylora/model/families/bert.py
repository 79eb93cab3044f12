"""BERT and its relatives, ModernBERT and NomicBERT: encoders, whose tokens attend to each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from manylora.config.blocks import HeadLayerConfig
from manylora.errors import ConfigError
from manylora.model.families import common
from manylora.model.families.family import ModelFamily, TensorNames

BERT = {
    "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "hidden_act": "gelu", "max_position_embeddings": 512, "type_vocab_size": 2,
    "layer_norm_eps": 1e-12, "tie_word_embeddings": True, "pad_token_id": 0,
}  # fmt: skip
ROBERTA = {**BERT, "vocab_size": 50265, "pad_token_id": 1}
XLM_ROBERTA = {**ROBERTA, "vocab_size": 30522}
MPNET = {
    **BERT, "vocab_size": 30527, "pad_token_id": 1, "relative_attention_num_buckets": 32,
}  # fmt: skip
ELECTRA = {
    **BERT, "embedding_size": 128, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024,
}  # fmt: skip
DISTILBERT = {
    **BERT, "num_hidden_layers": 6, "hidden_dim": 3072, "activation": "gelu",
}  # fmt: skip
DISTILBERT_ALIASES = {
    "dim": "hidden_size", "n_heads": "num_attention_heads", "n_layers": "num_hidden_layers",
}  # fmt: skip
BUCKETS = 32  # of MPNet's relative positions; transformers computes this many, whatever the table has
BERT_UNUSED = (
    "cls.", "lm_head.", "pooler.", "bert.pooler.", "roberta.pooler.", "mpnet.pooler.", "qa_outputs.",
    "discriminator_predictions.", "generator_predictions.", "generator_lm_head.", "vocab_transform.",
    "vocab_layer_norm.", "vocab_projector.",
)  # fmt: skip


BERT_NAMES = TensorNames(
    roots=("bert.", "roberta.", "mpnet.", "electra.", "distilbert."),
    unused=BERT_UNUSED,
    embed="embeddings.word_embeddings",
    head_layer="pooler.dense",
    positions="embeddings.position_embeddings",
    embedding_norm="embeddings.LayerNorm",
    project="embeddings_project",
    norm="",
    layers="encoder.layer",
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    out="attention.output.dense",
    up_gate=("intermediate.dense",),
    down="output.dense",
    block_norms={"attention_norm": "attention.output.LayerNorm", "mlp_norm": "output.LayerNorm"},
)
MPNET_NAMES = replace(
    BERT_NAMES,
    relative="encoder.relative_attention_bias",
    qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
    out="attention.attn.o",
    block_norms={"attention_norm": "attention.LayerNorm", "mlp_norm": "output.LayerNorm"},
)
DISTILBERT_NAMES = replace(
    BERT_NAMES,
    head_layer="pre_classifier",
    layers="transformer.layer",
    qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    out="attention.out_lin",
    up_gate=("ffn.lin1",),
    down="ffn.lin2",
    block_norms={"attention_norm": "sa_layer_norm", "mlp_norm": "output_layer_norm"},
)
ENCODER = {"bidirectional": True, "makes_text": False, "tie_word_embeddings": True}


def _bert(raw: Mapping[str, Any]) -> dict[str, Any]:
    common.refuse(raw, "is_decoder", "add_cross_attention")
    kind = raw.get("position_embedding_type") or "absolute"
    if kind != "absolute":
        raise ConfigError(f"config.json: position_embedding_type {kind!r} is not supported, only absolute")
    return {
        "norm": "layer",
        "norm_eps": float(raw["layer_norm_eps"]),
        "learned_positions": True,
        "post_norm": True,
        "gated_mlp": False,
        **common.all_biased(True),
        **ENCODER,
        "token_types": int(raw["type_vocab_size"]),
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
    return {
        **_bert({**raw, "type_vocab_size": 0, "layer_norm_eps": 1e-12}),
        "activation": common.read_activation(raw["activation"]),
        "head_layer": HeadLayerConfig("relu"),
        "head_dense_activation": "relu",
    }


MODERNBERT = {
    "vocab_size": 50368, "hidden_size": 768, "intermediate_size": 1152, "num_hidden_layers": 22,
    "num_attention_heads": 12, "hidden_activation": "gelu", "max_position_embeddings": 8192,
    "norm_eps": 1e-5, "norm_bias": False, "attention_bias": False, "mlp_bias": False, "layer_types": None,
    "rope_theta": 160000.0, "rope_local_base_freq": 10000.0, "local_attention": 128,
    "classifier_bias": False, "classifier_activation": "gelu", "tie_word_embeddings": True,
}  # fmt: skip


def _modernbert(raw: Mapping[str, Any]) -> dict[str, Any]:
    every = raw.get("global_attn_every_n_layers", 3)
    windowed = [bool(layer % every) for layer in range(raw["num_hidden_layers"])]
    activation = common.read_activation(raw["classifier_activation"])
    return {
        "norm": "layer",
        "norm_eps": float(raw["norm_eps"]),
        "norm_bias": bool(raw["norm_bias"]),
        "first_norm": False,
        "activation": common.read_activation(raw["hidden_activation"]),
        **common.read_biases(raw),
        "mlp_bias": bool(raw["mlp_bias"]),
        "sliding_windows": common.read_windows(raw, windowed),
        "rope_local_theta": float(raw["rope_local_base_freq"]),
        **ENCODER,
        "head_layer": HeadLayerConfig(activation, bool(raw["classifier_bias"]), norm=True, each=True),
    }


def _modernbert_settings(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """With Gemma 3's names of rotary bases, and a window that counts one side and the token itself."""
    if raw.get("rope_scaling"):
        raise ConfigError("config.json: rope_scaling is not supported for ModernBERT")
    return common.flat_rope(
        {
            **raw,
            "rope_theta": raw.get("global_rope_theta", raw["rope_theta"]),
            "rope_local_base_freq": raw.get("local_rope_theta", raw["rope_local_base_freq"]),
            "sliding_window": raw["local_attention"] // 2 + 1,
        }
    )


MODERNBERT_NAMES = TensorNames(
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
NOMIC = {
    "vocab_size": 30528, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "hidden_act": "silu", "max_position_embeddings": 2048, "type_vocab_size": 2,
    "layer_norm_eps": 1e-12, "rope_theta": 1000.0, "tie_word_embeddings": True,
}  # fmt: skip
# From the names in Nomic's own files to those of transformers.
NOMIC_ALIASES = {
    "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
    "n_inner": "intermediate_size", "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps", "rotary_emb_base": "rope_theta",
}  # fmt: skip
NOMIC_REFUSED = (
    "prenorm", "parallel_block", "qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "use_rms_norm",
    "num_experts",
    "rotary_emb_interleaved", "rotary_emb_scale_base", "scale_attn_by_inverse_layer_idx", "causal",
)  # fmt: skip
NOMIC_NAMES = TensorNames(
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


def _nomic(raw: Mapping[str, Any]) -> dict[str, Any]:
    common.refuse(raw, *NOMIC_REFUSED)
    if raw.get("activation_function") not in (None, "swiglu"):
        raise ConfigError(
            f"config.json: activation_function {raw['activation_function']!r} is not supported, only swiglu"
        )
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
        **ENCODER,
        "token_types": int(raw["type_vocab_size"]),
        "head_layer": HeadLayerConfig("tanh"),
    }


FAMILIES = {
    "BertModel": ModelFamily(BERT, _bert, lambda _: BERT_NAMES),
    "RobertaModel": ModelFamily(ROBERTA, _roberta, lambda _: BERT_NAMES),
    "XLMRobertaModel": ModelFamily(XLM_ROBERTA, _roberta, lambda _: BERT_NAMES),
    "CamembertModel": ModelFamily(XLM_ROBERTA, _roberta, lambda _: BERT_NAMES),
    "MPNetModel": ModelFamily(MPNET, _mpnet, lambda _: MPNET_NAMES),
    "ElectraModel": ModelFamily(ELECTRA, _electra, lambda _: BERT_NAMES),
    "DistilBertModel": ModelFamily(
        DISTILBERT,
        _distilbert,
        lambda _: DISTILBERT_NAMES,
        lambda raw: {**raw, "intermediate_size": raw["hidden_dim"]},
        aliases=DISTILBERT_ALIASES,
    ),
    "ModernBertModel": ModelFamily(MODERNBERT, _modernbert, lambda _: MODERNBERT_NAMES, _modernbert_settings),
    "NomicBertModel": ModelFamily(
        NOMIC,
        _nomic,
        lambda _: NOMIC_NAMES,
        lambda raw: {**raw, "intermediate_size": raw["intermediate_size"] or 4 * raw["hidden_size"]},
        aliases=NOMIC_ALIASES,
    ),
}
"""Also with heads, such as BertForSequenceClassification."""
