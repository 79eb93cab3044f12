"""The encoder-decoder models T5, T5 1.1, Flan-T5 and mT5 (relative positions, RMSNorm, unscaled attention),
and BART (learned positions, LayerNorm after each residual sum, biases everywhere).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from manylora.config.model import EncoderConfig, ModelConfig
from manylora.errors import ConfigError
from manylora.model.families.common import read_activation, refuse
from manylora.model.families.family import ModelFamily, TensorNames

T5 = {
    "vocab_size": 32128, "hidden_size": 512, "head_dim": 64, "d_ff": 2048, "num_layers": 6,
    "num_decoder_layers": None, "num_attention_heads": 8, "n_positions": 512,
    "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6, "feed_forward_proj": "relu", "tie_word_embeddings": True,
}  # fmt: skip
MT5 = {
    **T5, "vocab_size": 250112, "d_ff": 1024, "num_layers": 8, "num_attention_heads": 6,
    "feed_forward_proj": "gated-gelu",
}  # fmt: skip
T5_ALIASES = {
    "d_model": "hidden_size", "num_heads": "num_attention_heads", "num_hidden_layers": "num_layers",
    "d_kv": "head_dim",
}  # fmt: skip
# Released files have this table in addition to self-attention's; no model uses it.
OBSOLETE = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias."


def _t5(raw: Mapping[str, Any]) -> dict[str, Any]:
    gate, _, activation = str(raw["feed_forward_proj"]).rpartition("-")
    if gate not in ("", "gated"):
        raise ConfigError(
            f"config.json: feed_forward_proj {raw['feed_forward_proj']!r} is not supported; it must be an "
            "activation, or gated- and an activation"
        )
    # T5 1.0 scales the logits, because its head is the embedding. config.json does not have this setting.
    scaled = raw.get("scale_decoder_outputs", raw["tie_word_embeddings"] is not False)
    encoder = EncoderConfig(
        num_layers=raw["num_encoder_layers"],
        decoder_start_id=raw.get("decoder_start_token_id") or 0,
        forced_bos_id=raw.get("forced_bos_token_id"),
        relative_buckets=raw["relative_attention_num_buckets"],
        relative_max_distance=raw["relative_attention_max_distance"],
    )
    return {
        "num_kv_heads": raw["num_attention_heads"],
        "norm_eps": raw["layer_norm_epsilon"],
        "activation": read_activation("gelu_new" if gate and activation == "gelu" else activation),
        "gated_mlp": bool(gate),
        "attention_scale": 1.0,
        "logits_scale": float(raw["hidden_size"]) ** -0.5 if scaled else 1.0,
        # A separate head is loaded if the checkpoint has one. config.json is not reliable: newer versions of
        # transformers write true for every T5.
        "tie_word_embeddings": True,
        "encoder": encoder,
    }


def _rename_t5(raw: Mapping[str, Any]) -> dict[str, Any]:
    layers = raw["num_layers"]
    return {
        **raw,
        "intermediate_size": raw["d_ff"],
        "max_position_embeddings": raw["n_positions"] or 512,
        "num_encoder_layers": layers,
        "num_hidden_layers": layers + (raw["num_decoder_layers"] or layers),
    }


def _t5_names(config: ModelConfig, decodes: bool) -> TensorNames:
    """A decoder layer has three sublayers. The second one is cross-attention."""
    mlp = "layer.2" if decodes else "layer.1"
    attention, dense = "layer.0.SelfAttention.", f"{mlp}.DenseReluDense"
    norms = {"attention_norm": "layer.0.layer_norm", "mlp_norm": f"{mlp}.layer_norm"}
    return TensorNames(
        roots=("decoder." if decodes else "encoder.",),
        unused=(OBSOLETE,),
        norm="final_layer_norm",
        layers="block",
        qkv=(f"{attention}q", f"{attention}k", f"{attention}v"),
        out=f"{attention}o",
        up_gate=(f"{dense}.wi_1", f"{dense}.wi_0") if config.gated_mlp else (f"{dense}.wi",),
        down=f"{dense}.wo",
        block_norms={**norms, "cross_norm": "layer.1.layer_norm"} if decodes else norms,
        relative=f"block.0.{attention}relative_attention_bias",
        cross=tuple(f"layer.1.EncDecAttention.{name}" for name in "qkvo") if decodes else (),
    )


POSITION_OFFSET = 2  # rows of the position table before position 0
BART = {
    "vocab_size": 50265, "max_position_embeddings": 1024, "d_model": 1024, "encoder_layers": 12,
    "encoder_ffn_dim": 4096, "encoder_attention_heads": 16, "decoder_layers": 12, "decoder_ffn_dim": 4096,
    "decoder_attention_heads": 16, "activation_function": "gelu", "scale_embedding": False,
    "decoder_start_token_id": 2, "tie_word_embeddings": True,
}  # fmt: skip
BART_ALIASES = {
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


def _rename_bart(raw: Mapping[str, Any]) -> dict[str, Any]:
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


FAMILIES = {
    **{
        name: ModelFamily(
            defaults,
            config,
            partial(_t5_names, decodes=True),
            _rename_t5,
            partial(_t5_names, decodes=False),
            T5_ALIASES,
        )
        for name, defaults, config in (
            ("T5ForConditionalGeneration", T5, _t5),
            # Logits are never scaled, even if config.json says that the head is tied.
            ("MT5ForConditionalGeneration", MT5, lambda raw: {**_t5(raw), "logits_scale": 1.0}),
        )
    },
    "BartForConditionalGeneration": ModelFamily(BART, _bart, _decoder, _rename_bart, _encoder, BART_ALIASES),
}
