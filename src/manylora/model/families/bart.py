"""BART, an encoder-decoder model: learned positions, LayerNorm after each residual sum, biases everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from manylora.config.model import EncoderConfig, ModelConfig
from manylora.errors import ConfigError
from manylora.model.families.common import read_activation, refuse
from manylora.model.families.family import ModelFamily, TensorNames

POSITION_OFFSET = 2  # rows of the position table before position 0
BART = {
    "vocab_size": 50265, "max_position_embeddings": 1024, "d_model": 1024, "encoder_layers": 12,
    "encoder_ffn_dim": 4096, "encoder_attention_heads": 16, "decoder_layers": 12, "decoder_ffn_dim": 4096,
    "decoder_attention_heads": 16, "activation_function": "gelu", "scale_embedding": False,
    "decoder_start_token_id": 2, "tie_word_embeddings": True,
}  # fmt: skip
ALIASES = {
    "hidden_size": "d_model", "num_attention_heads": "encoder_attention_heads",
    "num_hidden_layers": "encoder_layers",
}  # fmt: skip
ATTENTION = ("q_proj", "k_proj", "v_proj", "out_proj")


def _bart(raw: Mapping[str, Any]) -> dict[str, Any]:
    refuse(raw, "normalize_before", "add_final_layer_norm", "static_position_embeddings")
    ours, theirs, heads = raw["encoder_ffn_dim"], raw["decoder_ffn_dim"], raw["encoder_attention_heads"]
    if ours != theirs:
        raise ConfigError(
            f"config.json: encoder_ffn_dim ({ours}) and decoder_ffn_dim ({theirs}) must be equal"
        )
    if heads < 1 or raw["d_model"] % heads:
        raise ConfigError(f"config.json: d_model {raw['d_model']} is not of {heads} encoder_attention_heads")
    start = raw["decoder_start_token_id"]
    if not isinstance(start, int):
        raise ConfigError(f"config.json: decoder_start_token_id must be a token id, got {start!r}")
    encoder = EncoderConfig(
        num_layers=raw["encoder_layers"],
        decoder_start_id=start,
        forced_bos_id=raw.get("forced_bos_token_id"),
        post_norm=True,
        head_dim=raw["d_model"] // heads,
    )
    return {
        "norm": "layer",
        "norm_eps": 1e-5,
        "learned_positions": True,
        "position_offset": POSITION_OFFSET,
        "activation": read_activation(raw["activation_function"]),
        "gated_mlp": False,
        **dict.fromkeys(("attention_bias", "attention_out_bias", "mlp_bias", "head_bias"), True),
        "embedding_scale": float(raw["hidden_size"]) ** 0.5 if raw["scale_embedding"] else 1.0,
        "tie_word_embeddings": True,  # unless the checkpoint has separate tables
        "encoder": encoder,
    }


def _rename(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **raw,
        "hidden_size": raw["d_model"],
        "intermediate_size": raw["decoder_ffn_dim"],
        "num_hidden_layers": raw["encoder_layers"] + raw["decoder_layers"],
        "num_attention_heads": raw["decoder_attention_heads"],
    }


def _decoder(config: ModelConfig) -> TensorNames:
    names = _encoder(config)
    return replace(
        names,
        roots=("model.decoder.", "decoder."),
        block_norms={**names.block_norms, "cross_norm": "encoder_attn_layer_norm"},
        cross=tuple(f"encoder_attn.{name}" for name in ATTENTION),
    )


def _encoder(_: ModelConfig) -> TensorNames:
    *qkv, out = (f"self_attn.{name}" for name in ATTENTION)
    return TensorNames(
        roots=("model.encoder.", "encoder."),
        positions="embed_positions",
        embedding_norm="layernorm_embedding",
        norm="",
        qkv=tuple(qkv),
        out=out,
        up_gate=("fc1",),
        down="fc2",
        block_norms={"attention_norm": "self_attn_layer_norm", "mlp_norm": "final_layer_norm"},
    )


FAMILIES = {"BartForConditionalGeneration": ModelFamily(BART, _bart, _decoder, _rename, _encoder, ALIASES)}
