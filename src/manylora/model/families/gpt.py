"""GPT-2, OPT, GPT-NeoX, Falcon, Phi, StarCoder2, StableLM and Nemotron: LayerNorm, mostly no gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from manylora.config.model import ModelConfig
from manylora.errors import ConfigError
from manylora.model.families.common import all_biased, read_activation, read_biases, read_windows, refuse
from manylora.model.families.family import BLOCK_NORMS, ModelFamily, TensorNames
from manylora.model.families.llama import PLAIN

ONE_NORM = {"attention_norm": "input_layernorm"}
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
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    block_norms=ONE_NORM,
)
STARCODER2 = TensorNames(up_gate=("mlp.c_fc",), down="mlp.c_proj")

OPT = TensorNames(
    roots=("model.decoder.", "decoder."),
    positions="embed_positions",
    norm="final_layer_norm",
    out="self_attn.out_proj",
    up_gate=("fc1",),
    down="fc2",
    block_norms={"attention_norm": "self_attn_layer_norm", "mlp_norm": "final_layer_norm"},
)
NEMOTRON = TensorNames(up_gate=("mlp.up_proj",))
STABLELM = TensorNames(
    q_norm="self_attn.q_layernorm.norms.{}",
    k_norm="self_attn.k_layernorm.norms.{}",
)

GPT2_DEFAULTS = {
    "vocab_size": 50257, "max_position_embeddings": 1024, "hidden_size": 768, "num_hidden_layers": 12,
    "num_attention_heads": 12, "n_inner": None, "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
    "tie_word_embeddings": True,
}  # fmt: skip
GPT2_ALIASES = {
    "n_embd": "hidden_size", "n_positions": "max_position_embeddings", "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
}  # fmt: skip
NEOX_DEFAULTS = {
    "vocab_size": 50432, "hidden_size": 6144, "num_hidden_layers": 44, "num_attention_heads": 64,
    "intermediate_size": 24576, "hidden_act": "gelu", "max_position_embeddings": 2048,
    "layer_norm_eps": 1e-5, "tie_word_embeddings": False, "use_parallel_residual": True,
    "rotary_emb_base": 10000.0, "rotary_pct": 0.25, "attention_bias": True,
}  # fmt: skip
NEOX_ROPE = {"theta": "rotary_emb_base", "partial": "rotary_pct"}
FALCON = {
    "vocab_size": 65024, "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
    "num_ln_in_parallel_attn": None, "layer_norm_epsilon": 1e-5, "num_kv_heads": None,
    "new_decoder_architecture": False, "multi_query": True, "parallel_attn": True, "bias": False,
    "max_position_embeddings": 2048, "ffn_hidden_size": None, "activation": "gelu",
    "tie_word_embeddings": True, "rope_theta": 10000.0,
}  # fmt: skip
FALCON_ALIASES = {"n_embed": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
PHI_DEFAULTS = {
    **PLAIN, "vocab_size": 51200, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24,
    "hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "qk_layernorm": False,
}  # fmt: skip
PHI_ROPE = {"partial": "partial_rotary_factor"}
STARCODER2_DEFAULTS = {
    **PLAIN, "vocab_size": 49152, "hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 30,
    "num_attention_heads": 24, "num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh", "use_bias": True,
    "max_position_embeddings": 4096, "norm_epsilon": 1e-5, "tie_word_embeddings": True,
    "sliding_window": None,
}  # fmt: skip

OPT_DEFAULTS = {
    "vocab_size": 50272, "hidden_size": 768, "num_hidden_layers": 12, "ffn_dim": 3072,
    "max_position_embeddings": 2048, "do_layer_norm_before": True, "_remove_final_layer_norm": False,
    "word_embed_proj_dim": None, "num_attention_heads": 12, "activation_function": "relu",
    "enable_bias": True, "layer_norm_elementwise_affine": True, "tie_word_embeddings": True,
}  # fmt: skip
STABLELM_DEFAULTS = {
    **PLAIN, "vocab_size": 50304, "hidden_size": 2560, "intermediate_size": 6912, "num_key_value_heads": 32,
    "max_position_embeddings": 4096, "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25,
    "use_qkv_bias": False, "qk_layernorm": False, "use_parallel_residual": False,
}  # fmt: skip
NEMOTRON_DEFAULTS = {
    **PLAIN, "vocab_size": 256000, "hidden_size": 6144, "intermediate_size": 24576,
    "num_attention_heads": 48, "hidden_act": "relu2", "max_position_embeddings": 4096, "norm_eps": 1e-5,
    "partial_rotary_factor": 0.5, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip


def _gpt2(raw: Mapping[str, Any]) -> dict[str, Any]:
    refuse(raw, "add_cross_attention")  # reorder_and_upcast_attn is about float16 during training
    return {
        **_one_key_per_head(raw),
        "learned_positions": True,
        **_plain_layers(raw, "layer_norm_epsilon", "activation_function"),
        "transposed_weights": True,
        "attention_scale": None if raw["scale_attn_weights"] else 1.0,
        "scaled_by_layer": bool(raw["scale_attn_by_inverse_layer_idx"]),
        **all_biased(True),
    }


def _neox(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_one_key_per_head(raw),
        **_plain_layers(raw, "layer_norm_eps", "hidden_act"),
        "parallel_blocks": bool(raw["use_parallel_residual"]),
        "qkv_groups": raw["num_attention_heads"],
        **read_biases(raw),
        "mlp_bias": True,
    }


def _falcon(raw: Mapping[str, Any]) -> dict[str, Any]:
    refuse(raw, "alibi")
    heads = raw["num_attention_heads"]
    new = bool(raw["new_decoder_architecture"])
    kv_heads = (raw["num_kv_heads"] or heads) if new else 1 if raw["multi_query"] else heads
    parallel = new or bool(raw["parallel_attn"])
    norms = raw["num_ln_in_parallel_attn"] or (2 if new else 1)
    return {
        **_one_key_per_head(raw),
        "num_kv_heads": kv_heads,
        **_plain_layers(raw, "layer_norm_epsilon", "activation"),
        "parallel_blocks": parallel,
        "shared_norm": parallel and not (new and norms == 2),
        "qkv_groups": kv_heads,
        **all_biased(bool(raw["bias"])),
    }


def _falcon_names(config: ModelConfig) -> TensorNames:
    norms = BLOCK_NORMS
    if config.parallel_blocks:
        norms = ONE_NORM if config.shared_norm else {"attention_norm": "ln_attn", "mlp_norm": "ln_mlp"}
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


def _opt(raw: Mapping[str, Any]) -> dict[str, Any]:
    refuse(raw, "_remove_final_layer_norm")
    if not raw["layer_norm_elementwise_affine"]:
        raise ConfigError("config.json: layer_norm_elementwise_affine False is not supported")
    size = raw["word_embed_proj_dim"]
    return {
        "post_norm": not raw["do_layer_norm_before"],
        "projected_size": None if size == raw["hidden_size"] else size,
        **_one_key_per_head(raw),
        **_plain_layers({**raw, "eps": 1e-5}, "eps", "activation_function"),
        "learned_positions": True,
        "position_offset": 2,
        **all_biased(bool(raw["enable_bias"])),
    }


def _stablelm(raw: Mapping[str, Any]) -> dict[str, Any]:
    parallel = bool(raw["use_parallel_residual"])
    return {
        **_plain_layers(raw, "layer_norm_eps", "hidden_act"),
        "gated_mlp": True,
        "head_dim": raw["hidden_size"] // raw["num_attention_heads"],
        "qk_norm": "each" if raw["qk_layernorm"] else "",
        "attention_bias": bool(raw["use_qkv_bias"]),
        "parallel_blocks": parallel,
        "shared_norm": parallel,
    }


def _plain_layers(raw: Mapping[str, Any], eps: str, activation: str) -> dict[str, Any]:
    """LayerNorm and an MLP without a gate. eps, activation: their keys in config.json."""
    return {
        "norm": "layer",
        "norm_eps": raw[eps],
        "activation": read_activation(raw[activation]),
        "gated_mlp": False,
    }


def _one_key_per_head(raw: Mapping[str, Any]) -> dict[str, Any]:
    """For families that ignore num_key_value_heads and head_dim in config.json."""
    heads = raw["num_attention_heads"]
    return {"num_kv_heads": heads, "head_dim": raw["hidden_size"] // heads}


FAMILIES = {
    "GPT2LMHeadModel": ModelFamily(
        GPT2_DEFAULTS,
        _gpt2,
        lambda _: GPT2,
        lambda raw: {**raw, "intermediate_size": raw["n_inner"] or 4 * raw["hidden_size"]},
        aliases=GPT2_ALIASES,
    ),
    "OPTForCausalLM": ModelFamily(
        OPT_DEFAULTS,
        _opt,
        lambda config: replace(OPT, norm="") if config.post_norm else OPT,
        lambda raw: {**raw, "intermediate_size": raw["ffn_dim"]},
    ),
    "StableLmForCausalLM": ModelFamily(
        STABLELM_DEFAULTS,
        _stablelm,
        lambda config: replace(STABLELM, block_norms=ONE_NORM) if config.parallel_blocks else STABLELM,
        rope=PHI_ROPE,
    ),
    "NemotronForCausalLM": ModelFamily(
        NEMOTRON_DEFAULTS,
        lambda raw: {
            **_plain_layers(raw, "norm_eps", "hidden_act"),
            "norm": "layer_plus_one",
            **read_biases(raw),
            "mlp_bias": bool(raw["mlp_bias"]),
        },
        lambda _: NEMOTRON,
        rope=PHI_ROPE,
    ),
    "GPTNeoXForCausalLM": ModelFamily(NEOX_DEFAULTS, _neox, lambda _: NEOX, rope=NEOX_ROPE),
    "FalconForCausalLM": ModelFamily(
        FALCON,
        _falcon,
        _falcon_names,
        lambda raw: {**raw, "intermediate_size": raw["ffn_hidden_size"] or 4 * raw["hidden_size"]},
        aliases=FALCON_ALIASES,
    ),
    "PhiForCausalLM": ModelFamily(
        PHI_DEFAULTS,
        lambda raw: {
            "qk_norm": "head" if raw["qk_layernorm"] else "",
            **_plain_layers(raw, "layer_norm_eps", "hidden_act"),
            **dict.fromkeys(("parallel_blocks", "shared_norm", "head_bias"), True),
            **all_biased(True),
        },
        lambda _: PHI,
        rope=PHI_ROPE,
    ),
    "Starcoder2ForCausalLM": ModelFamily(
        STARCODER2_DEFAULTS,
        lambda raw: {
            **_plain_layers(raw, "norm_epsilon", "hidden_act"),
            "sliding_windows": read_windows(raw),
            **all_biased(bool(raw["use_bias"])),
        },
        lambda _: STARCODER2,
    ),
}
