"""GPT-2, GPT-NeoX, Falcon, Phi and StarCoder2: LayerNorm, an MLP without a gate, often parallel blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manylora.config.engine import ModelConfig
from manylora.model.families.common import read_activation, read_biases, read_rope, read_windows, refuse
from manylora.model.families.family import ModelFamily, TensorNames

GPT2 = TensorNames(
    roots=("transformer.", ""),  # the released files have no root
    embed="wte",
    positions="wpe",
    norm="ln_f",
    layers="h",
    qkv=("attn.c_attn",),
    out="attn.c_proj",
    up_gate=("mlp.c_fc",),
    down="mlp.c_proj",
    block_norms={"attention_norm": "ln_1", "mlp_norm": "ln_2"},
)
NEOX = TensorNames(
    roots=("gpt_neox.",),
    head="embed_out",
    embed="embed_in",
    norm="final_layer_norm",
    qkv=("attention.query_key_value",),
    out="attention.dense",
    up_gate=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
)
PHI = TensorNames(
    norm="final_layernorm",
    out="self_attn.dense",
    up_gate=("mlp.fc1",),
    down="mlp.fc2",
    block_norms={"attention_norm": "input_layernorm"},
)
STARCODER2 = TensorNames(up_gate=("mlp.c_fc",), down="mlp.c_proj")


def _gpt2(raw: Mapping[str, Any]) -> dict[str, Any]:
    refuse(raw, "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention")
    return {
        **_one_key_per_head(raw),
        "learned_positions": True,
        **_plain_layers(raw, "layer_norm_epsilon", "activation_function", "gelu_new"),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", True)),
        "transposed_weights": True,
        "attention_scale": None if raw.get("scale_attn_weights", True) else 1.0,
        **_all_biased(True),
    }


def _rename_gpt2(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **raw,
        "hidden_size": raw["n_embd"],
        "intermediate_size": raw.get("n_inner") or 4 * raw["n_embd"],
        "num_hidden_layers": raw["n_layer"],
        "num_attention_heads": raw["n_head"],
        "max_position_embeddings": raw["n_positions"],
    }


def _neox(raw: Mapping[str, Any]) -> dict[str, Any]:
    parameters = raw.get("rope_parameters") or {}
    return {
        **_one_key_per_head(raw),
        **_plain_layers(raw, "layer_norm_eps", "hidden_act", "gelu"),
        "parallel_blocks": bool(raw.get("use_parallel_residual", True)),
        "qkv_groups": raw["num_attention_heads"],
        **read_rope({"rope_theta": raw.get("rotary_emb_base"), **raw}),
        "partial_rotary_factor": float(parameters.get("partial_rotary_factor", raw.get("rotary_pct", 0.25))),
        **read_biases(raw, default=True),
        "mlp_bias": True,
    }


def _falcon(raw: Mapping[str, Any]) -> dict[str, Any]:
    refuse(raw, "alibi")
    heads = raw["num_attention_heads"]
    new = bool(raw.get("new_decoder_architecture", False))
    kv_heads = (raw.get("num_kv_heads") or heads) if new else 1 if raw.get("multi_query", True) else heads
    parallel = new or bool(raw.get("parallel_attn", True))
    norms = raw.get("num_ln_in_parallel_attn") or (2 if new else 1)
    return {
        **_one_key_per_head(raw),
        "num_kv_heads": kv_heads,
        **_plain_layers(raw, "layer_norm_epsilon", "activation", "gelu"),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", True)),
        "parallel_blocks": parallel,
        "shared_norm": parallel and not (new and norms == 2),
        "qkv_groups": kv_heads,
        **_all_biased(bool(raw.get("bias", False))),
    }


def _rename_falcon(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The first releases have n_layer and n_head, and leave out defaults."""
    return {
        **raw,
        "num_hidden_layers": raw.get("num_hidden_layers") or raw["n_layer"],
        "num_attention_heads": raw.get("num_attention_heads") or raw["n_head"],
        "intermediate_size": raw.get("ffn_hidden_size") or 4 * raw["hidden_size"],
        "max_position_embeddings": raw.get("max_position_embeddings") or 2048,
    }


def _falcon_names(config: ModelConfig) -> TensorNames:
    norms = {"attention_norm": "input_layernorm"}
    if config.parallel_blocks and not config.shared_norm:
        norms = {"attention_norm": "ln_attn", "mlp_norm": "ln_mlp"}
    elif not config.parallel_blocks:
        norms["mlp_norm"] = "post_attention_layernorm"
    return TensorNames(
        roots=("transformer.",),
        embed="word_embeddings",
        norm="ln_f",
        layers="h",
        qkv=("self_attention.query_key_value",),
        out="self_attention.dense",
        up_gate=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
        block_norms=norms,
    )


def _phi(raw: Mapping[str, Any]) -> dict[str, Any]:
    refuse(raw, "qk_layernorm")
    parameters = raw.get("rope_parameters") or {}
    return {
        **_plain_layers(raw, "layer_norm_eps", "hidden_act", "gelu_new"),
        "parallel_blocks": True,
        "shared_norm": True,
        "partial_rotary_factor": float(
            parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor", 0.5))
        ),
        "head_bias": True,
        **_all_biased(True),
    }


def _starcoder2(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_plain_layers(raw, "norm_epsilon", "hidden_act", "gelu_pytorch_tanh"),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", True)),
        "sliding_windows": read_windows(raw),
        **_all_biased(bool(raw.get("use_bias", True))),
    }


def _plain_layers(raw: Mapping[str, Any], eps: str, activation: str, default: str) -> dict[str, Any]:
    """LayerNorm and an MLP without a gate. eps, activation: their names in config.json."""
    return {
        "norm": "layer",
        "norm_eps": raw.get(eps, 1e-5),
        "activation": read_activation(raw.get(activation, default)),
        "gated_mlp": False,
    }


def _one_key_per_head(raw: Mapping[str, Any]) -> dict[str, Any]:
    """These families ignore num_key_value_heads and head_dim in config.json."""
    heads = raw["num_attention_heads"]
    return {"num_kv_heads": heads, "head_dim": raw["hidden_size"] // heads}


def _all_biased(biased: bool) -> dict[str, Any]:
    return dict.fromkeys(("attention_bias", "attention_out_bias", "mlp_bias"), biased)


FAMILIES = {
    "GPT2LMHeadModel": ModelFamily(_gpt2, lambda _: GPT2, _rename_gpt2),
    "GPTNeoXForCausalLM": ModelFamily(_neox, lambda _: NEOX),
    "FalconForCausalLM": ModelFamily(_falcon, _falcon_names, _rename_falcon),
    "PhiForCausalLM": ModelFamily(_phi, lambda _: PHI),
    "Starcoder2ForCausalLM": ModelFamily(_starcoder2, lambda _: STARCODER2),
}
