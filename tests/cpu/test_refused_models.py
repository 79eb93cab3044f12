"""Protects refusals of models: what in a config.json cannot be served is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_checkpoints import AWQ, FP8, GPTQ, compressed
from test_encoders import VARIANTS, make_encoder
from tiny_models import make_model

from manylora.errors import ConfigError
from manylora.kernels.device import open_device
from manylora.model.checkpoint import read_model_config
from manylora.model.families.gemma import shared_kv
from manylora.model.weights import load_decoder

LINEAR = {"rope_type": "linear", "factor": 2.0}
CASES: dict[str, list[tuple[dict[str, Any], str]]] = {
    "llama": [
        ({"architectures": ["ViTModel"]}, "ViTModel is not supported; supported are LlamaFor"),
        ({"hidden_act": "mish"}, "activation 'mish' is not supported; supported are silu"),
        ({"hidden_size": None, "num_attention_heads": 4}, "must be a whole number"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key heads"),
        ({"rope_scaling": {"rope_type": "su3"}}, "rope scaling 'su3' is not supported; supported are"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope scaling 'linear' lacks 'factor'"),
        ({"partial_rotary_factor": 0.5, "rope_scaling": LINEAR}, "0.5 with rope scaling 'linear' is not"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "full_attention alone is not"),
    ],
    "smollm3": [({"no_rope_layers": [1]}, "no_rope_layers has 1 entries for num_hidden_layers 4")],
    "opt": [({"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine False is not")],
    "falcon": [({"alibi": True}, "alibi True is not supported")],
    "gemma3": [({"layer_types": ["full_attention"]}, "layer_types has 1 entries for num_hidden_layers 2")],
    "gemma3n": [
        ({"intermediate_size": [96, 96, 80, 96, 96, 96]}, "intermediate_size must be the same"),
        ({"activation_sparsity_pattern": [0.5]}, "activation_sparsity_pattern must be 6 numbers"),
        ({"altup_num_inputs": 9}, "altup_num_inputs must be from 2 to"),
    ],
    "gemma4": [
        ({"per_layer_config": {"1": {"head_dim": 40, "sliding_window": 3}}}, "sliding_window in per_layer"),
        ({"per_layer_config": {"1": {"head_dim": 0}}}, "head_dim of layer 1 must be a whole number"),
        ({"per_layer_config": {"1": {"num_key_value_heads": 3}}}, "cannot share 3 key heads"),
        ({"use_bidirectional_attention": "all"}, "both directions"),
    ],
    "llama4": [
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types other than chunked where"),
        ({"rope_parameters": {**LINEAR, "rope_type": "yarn"}}, "rope scaling 'yarn' is not supported here"),
    ],
    "lfm2": [
        ({"layer_types": ["conv", "full_attention", "sliding_attention"]}, "has 'sliding_attention', which"),
    ],
    "granite4": [({"layer_types": ["mamba"] * 3}, "must have full_attention in one")],
    "deepseek-v3": [
        ({"topk_group": 5}, "n_group 4 and topk_group 5 do not divide 8 experts"),
    ],
    "deepseek-v2": [({"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported")],
    "deepseek-v2-lite": [({"attention_bias": True}, "attention_bias without q_lora_rank is not supported")],
    "glm4-moe-lite": [({"mlp_layer_types": ["dense"]}, "mlp_layer_types has 1 entries for")],
    "qwen3-moe": [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok must be 1 to the number of experts"),
        ({"moe_intermediate_size": 41}, r"must be \(41, 64\) by config.json, got \(40, 64\)"),
    ],
    "t5": [({"feed_forward_proj": "glued-gelu"}, "feed_forward_proj")],
    "bart": [({"decoder_ffn_dim": 32}, "must be equal"), ({"normalize_before": True}, "normalize_before")],
    "nomic_bert": [({"prenorm": True}, "prenorm True is not supported")],
}  # fmt: skip
QUANTISED: list[tuple[Any, str]] = [
    ({"quant_method": "hqq"}, "quant_method 'hqq' is not supported; supported are awq"),
    ({**AWQ, "version": "gemv"}, "version 'gemv' is not supported; supported: gemm, exllama"),
    ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported"),
    (compressed("nvfp4-pack-quantized", "float", 4), "format 'nvfp4-pack-quantized' is not supported"),
    ({**FP8, "weight_block_size": [128]}, r"weight_block_size must be two sizes, as \[128, 128\]"),
    ({**FP8, "fmt": "e5m2"}, "fmt 'e5m2' is not supported"),
    ("awq", "quantization_config: 'str' object"),
]
CASES["llama"] += [({"quantization_config": settings}, reason) for settings, reason in QUANTISED]


@pytest.mark.parametrize("family", CASES)
def test_what_cannot_be_served_is_named(family: str, tmp_path: Path) -> None:
    make = make_encoder if family in VARIANTS else make_model
    model, changed = make(tmp_path / "model", family), tmp_path / "changed"
    raw = json.loads((model / "config.json").read_text(encoding="utf-8"))
    changed.mkdir()
    (changed / "model.safetensors").symlink_to(model / "model.safetensors")
    for settings, reason in CASES[family]:
        (changed / "config.json").write_text(json.dumps({**raw, **settings}), encoding="utf-8")
        with pytest.raises(ConfigError, match=reason):
            load_decoder(changed, read_model_config(changed), torch.float32, open_device("cpu"))


def test_layers_share_with_the_last_of_their_kind() -> None:
    assert shared_kv((9, None, 9, None, 9), 0) == ()
    assert shared_kv((9, 9, None, 9, None, 9), 3) == (0, 1, 2, 1, 2, 1)
    for kinds, shared in (((9, 9), 2), ((9, 9), -1), ((9, 9, None), 1)):
        with pytest.raises(ConfigError, match="num_kv_shared_layers"):
            shared_kv(kinds, shared)
