"""BERT and its relatives, ModernBERT and NomicBERT: encoders, whose tokens attend to each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from manylora.config.blocks import HeadLayerConfig
from manylora.config.model import ModelConfig
from manylora.errors import ConfigError
from manylora.model.families.common import flat_rope, read_activation, read_windows, refuse
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
BERT_UNUSED = (
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
        unused=BERT_UNUSED,
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


MODERNBERT = {
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


def _modernbert_settings(raw: Mapping[str, Any]) -> Mapping[str, Any]:
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


def _modernbert_names(_: ModelConfig) -> TensorNames:
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


def _nomic(raw: Mapping[str, Any]) -> dict[str, Any]:
    refuse(raw, *NOMIC_REFUSED)
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


def _nomic_settings(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    if raw.get("activation_function") not in (None, "swiglu"):
        raise ConfigError(
            f"config.json: activation_function {raw['activation_function']!r} is not supported, only swiglu"
        )
    return {**raw, "intermediate_size": raw["intermediate_size"] or 4 * raw["hidden_size"]}


def _nomic_names(_: ModelConfig) -> TensorNames:
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
    "ModernBertModel": ModelFamily(MODERNBERT, _modernbert, _modernbert_names, _modernbert_settings),
    "NomicBertModel": ModelFamily(NOMIC, _nomic, _nomic_names, _nomic_settings, aliases=NOMIC_ALIASES),
}
"""Also with heads, such as BertForSequenceClassification."""
