"""Llama and similar families: RMSNorm, rotary positions, a gated MLP, sequential blocks; and GLM-4, Cohere
and ERNIE 4.5, whose rotary positions rotate pairs of adjacent elements of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from manylora.errors import ConfigError
from manylora.model.families.common import (
    all_biased,
    flat_rope,
    read_biases,
    read_windows,
    text_settings,
    windows_but,
)
from manylora.model.families.family import ModelFamily, TensorNames, text_tower

PHI3 = TensorNames(qkv=("self_attn.qkv_proj",), up_gate=("mlp.gate_up_proj",))
# The defaults of transformers 5.23, and of 4.44 and 4.57, except where docs/models.md says otherwise.
PLAIN = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu",
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}  # fmt: skip
LLAMA = {**PLAIN, "attention_bias": False, "mlp_bias": False}
MISTRAL = {
    **PLAIN, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "sliding_window": 4096,
}  # fmt: skip
MINISTRAL = {**MISTRAL, "layer_types": None}
MINISTRAL3 = {
    **MISTRAL, "vocab_size": 131072, "num_hidden_layers": 34, "head_dim": 128, "sliding_window": None,
    "max_position_embeddings": 262144, "rms_norm_eps": 1e-5,
}  # fmt: skip
# The rotary parameters that its class in transformers uses if config.json has none.
MINISTRAL3_ROPE = {
    "type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "original_max_position_embeddings": 16384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
MISTRAL3_TEXT = {
    **MISTRAL, "vocab_size": 131072, "hidden_size": 5120, "intermediate_size": 32768, "head_dim": 128,
    "num_hidden_layers": 40, "rms_norm_eps": 1e-5, "sliding_window": None, "rope_theta": 1000000000.0,
}  # fmt: skip
MISTRAL3 = {"text_config": None, "tie_word_embeddings": True}
SMOLLM3 = {
    **LLAMA, "vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16,
    "num_key_value_heads": 4, "max_position_embeddings": 32768, "tie_word_embeddings": True,
    "rope_theta": 2000000.0, "use_sliding_window": False, "sliding_window": None, "layer_types": None,
    "no_rope_layers": None, "no_rope_layer_interval": 4,
}  # fmt: skip
QWEN2 = {
    **PLAIN, "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32,
    "max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096,
    "max_window_layers": 28, "layer_types": None,
}  # fmt: skip
QWEN3 = {**QWEN2, "head_dim": 128, "attention_bias": False}
PHI3_DEFAULTS = {
    **PLAIN, "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192,
    "max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "sliding_window": None, "partial_rotary_factor": 1.0,
}  # fmt: skip
GRANITE = {
    **LLAMA, "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}  # fmt: skip
OLMO2_DEFAULTS = {**PLAIN, "vocab_size": 50304, "rms_norm_eps": 1e-5, "attention_bias": False}
OLMO3 = {
    **OLMO2_DEFAULTS, "rope_theta": 500000.0, "rope_local_base_freq": 500000.0, "sliding_window": 4096,
    "layer_types": None,
}  # fmt: skip

EXAONE4 = {
    **PLAIN, "vocab_size": 102400, "intermediate_size": 16384, "num_key_value_heads": 32,
    "rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4, "layer_types": None,
}  # fmt: skip
INTERNLM3 = {
    **LLAMA, "vocab_size": 128512, "intermediate_size": 10240, "num_hidden_layers": 48,
    "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5,
}  # fmt: skip
# The defaults of the code in its repository, as transformers has no class for it.
INTERNLM2 = {**PLAIN, "vocab_size": 103168, "bias": True}

# The first releases of Phi-3 use the names su and yarn.
PHI3_ROPE = {
    "partial": "partial_rotary_factor", "renamed": {"su": "longrope", "yarn": "longrope"},
}  # fmt: skip
INTERNLM2_NAMES = TensorNames(
    head="output",
    embed="tok_embeddings",
    qkv=("attention.wqkv",),
    out="attention.wo",
    up_gate=("feed_forward.w3", "feed_forward.w1"),
    down="feed_forward.w2",
    block_norms={"attention_norm": "attention_norm", "mlp_norm": "ffn_norm"},
)
# OLMo 2 normalises the outputs of attention and MLP instead of their inputs.
OLMO2 = TensorNames(
    block_norms={
        "attention_post_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }
)


def _llama(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {**read_biases(raw), "mlp_bias": bool(raw["mlp_bias"])}


def _mistral(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {"sliding_windows": read_windows(raw)}


def _ministral3_rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or MINISTRAL3_ROPE
    # max_position_embeddings inside the rotary parameters has no effect.
    scaling = {name: value for name, value in given.items() if name != "max_position_embeddings"}
    return {**raw, "rope_scaling": None, "rope_parameters": scaling}


def _mistral3(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The text model is a Mistral in Mistral Small 3.x, and a Ministral 3 in Ministral 3."""
    text = raw["text_config"] or {}
    kind = text.get("model_type", "mistral")
    if kind == "ministral3":
        return _ministral3_rope(text_settings(raw, MINISTRAL3))
    if kind != "mistral":
        raise ConfigError(
            f"config.json: text_config.model_type {kind!r} is not supported: it must be mistral or ministral3"
        )
    return text_settings(raw, MISTRAL if text else MISTRAL3_TEXT)


def _smollm3(raw: Mapping[str, Any]) -> dict[str, Any]:
    count, rotated = raw["num_hidden_layers"], raw["no_rope_layers"]
    if rotated is None:
        interval = raw["no_rope_layer_interval"]
        rotated = [(layer + 1) % interval != 0 for layer in range(count)]
    if len(rotated) < count:
        raise ConfigError(
            f"config.json: no_rope_layers has {len(rotated)} entries for num_hidden_layers {count}"
        )
    still = [not one for one in rotated[:count]]
    sliding = still if raw["use_sliding_window"] else [False] * count
    return {
        **_llama(raw),
        "unrotated_layers": frozenset(layer for layer in range(count) if still[layer]),
        "sliding_windows": read_windows(raw, sliding),
    }


def read_granite(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "embedding_scale": float(raw["embedding_multiplier"]),
        "scales_vectors": True,
        "residual_scale": float(raw["residual_multiplier"]),
        "attention_scale": float(raw["attention_multiplier"]),
        "logits_scale": 1.0 / float(raw["logits_scaling"]),
    }


def _olmo2(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {**read_biases(raw), "norm": "rms_wide", "qk_norm": "all"}


def _olmo3(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary scaling applies only to layers without a window."""
    local = float(raw["rope_local_base_freq"])
    return {**_olmo2(raw), "rope_local_theta": local, "sliding_windows": windows_but(raw, 4)}


def _exaone4(raw: Mapping[str, Any]) -> dict[str, Any]:
    """If some layers have a window, the others have no rotary positions."""
    windows = windows_but(raw, raw["sliding_window_pattern"])
    still = frozenset(layer for layer, window in enumerate(windows) if window is None)
    return {"qk_norm": "head", "sliding_windows": windows, "unrotated_layers": still}


def _internlm3(raw: Mapping[str, Any]) -> dict[str, Any]:
    if raw["attention_bias"] != raw["mlp_bias"]:
        raise ConfigError("config.json: qkv_bias and bias must be equal")
    return _llama(raw)


def _qwen_windows(raw: Mapping[str, Any]) -> tuple[int | None, ...]:
    if not raw["use_sliding_window"]:
        return ()
    first = raw["max_window_layers"]
    return read_windows(raw, [layer >= first for layer in range(raw["num_hidden_layers"])])


GLM = TensorNames(up_gate=("mlp.gate_up_proj",))
GLM4 = replace(
    GLM,
    block_norms={
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_self_attn_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_mlp_layernorm",
    },
)
COHERE = TensorNames(block_norms={"attention_norm": "input_layernorm"})
GLM_DEFAULTS = {
    **PLAIN, "vocab_size": 151552, "intermediate_size": 13696, "num_hidden_layers": 40,
    "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072,
    "rms_norm_eps": 0.00000015625, "partial_rotary_factor": 0.5, "attention_bias": True,
}  # fmt: skip
GLM_ROPE = {"partial": "partial_rotary_factor"}
COHERE_DEFAULTS = {
    **PLAIN, "vocab_size": 256000, "hidden_size": 8192, "intermediate_size": 22528, "num_hidden_layers": 40,
    "num_attention_heads": 64, "max_position_embeddings": 8192, "layer_norm_eps": 1e-5,
    "tie_word_embeddings": True, "rope_theta": 500000.0, "attention_bias": False, "logit_scale": 0.0625,
    "use_qk_norm": False,
}  # fmt: skip
COHERE2 = {
    **COHERE_DEFAULTS, "rope_theta": 10000.0, "sliding_window": 4096, "layer_types": None,
    "sliding_window_pattern": 4,
}  # fmt: skip
ERNIE = {
    **PLAIN, "vocab_size": 103424, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 500000.0, "use_bias": False,
}  # fmt: skip


def _glm(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {"rope_interleaved": True, "attention_bias": bool(raw["attention_bias"])}


def _cohere(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Attention and MLP share one LayerNorm, which has no bias."""
    return {
        **read_biases(raw),
        "rope_interleaved": True,
        "norm": "layer",
        "norm_bias": False,
        "norm_eps": raw["layer_norm_eps"],
        "qk_norm": "each" if raw["use_qk_norm"] else "",
        "parallel_blocks": True,
        "shared_norm": True,
        "logits_scale": float(raw["logit_scale"]),
    }


def _cohere2(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Layers without a window have no rotary positions."""
    count, windows = raw["num_hidden_layers"], windows_but(raw, raw["sliding_window_pattern"])
    rotated = {layer for layer, window in enumerate(windows) if window is not None}
    return {
        **_cohere({**raw, "use_qk_norm": False}),
        "sliding_windows": windows,
        "unrotated_layers": frozenset(range(count)) - rotated,
    }


FAMILIES = {
    "LlamaForCausalLM": ModelFamily(LLAMA, _llama),
    "MistralForCausalLM": ModelFamily(MISTRAL, _mistral),
    "MinistralForCausalLM": ModelFamily(
        MINISTRAL, lambda raw: {"sliding_windows": read_windows(raw, [True] * raw["num_hidden_layers"])}
    ),
    "Ministral3ForCausalLM": ModelFamily(MINISTRAL3, _mistral, rename=_ministral3_rope),
    "Mistral3ForConditionalGeneration": ModelFamily(
        MISTRAL3, _mistral, lambda _: text_tower(TensorNames()), _mistral3
    ),
    "SmolLM3ForCausalLM": ModelFamily(SMOLLM3, _smollm3),
    "Qwen2ForCausalLM": ModelFamily(
        QWEN2, lambda raw: {"attention_bias": True, "sliding_windows": _qwen_windows(raw)}
    ),
    "Qwen3ForCausalLM": ModelFamily(
        QWEN3, lambda raw: {**read_biases(raw), "qk_norm": "head", "sliding_windows": _qwen_windows(raw)}
    ),
    "Phi3ForCausalLM": ModelFamily(
        PHI3_DEFAULTS, lambda raw: {**_mistral(raw), "rope_restarts": True}, lambda _: PHI3, rope=PHI3_ROPE
    ),
    "GraniteForCausalLM": ModelFamily(GRANITE, lambda raw: {**_llama(raw), **read_granite(raw)}),
    "Olmo2ForCausalLM": ModelFamily(OLMO2_DEFAULTS, _olmo2, lambda _: OLMO2),
    "Exaone4ForCausalLM": ModelFamily(EXAONE4, _exaone4, lambda _: OLMO2),
    "InternLM2ForCausalLM": ModelFamily(
        INTERNLM2,
        lambda raw: {  # the rows of the fused q, k and v are in groups, one for each key head
            "qkv_groups": raw["num_key_value_heads"] or raw["num_attention_heads"],
            **read_biases({"attention_bias": raw["bias"]}),
        },
        lambda _: INTERNLM2_NAMES,
    ),
    "InternLM3ForCausalLM": ModelFamily(
        INTERNLM3, _internlm3, aliases={"qkv_bias": "attention_bias", "bias": "mlp_bias"}
    ),
    "Olmo3ForCausalLM": ModelFamily(OLMO3, _olmo3, lambda _: OLMO2, flat_rope),
    "GlmForCausalLM": ModelFamily(GLM_DEFAULTS, _glm, lambda _: GLM, rope=GLM_ROPE),
    "Glm4ForCausalLM": ModelFamily(GLM_DEFAULTS, _glm, lambda _: GLM4, rope=GLM_ROPE),
    "CohereForCausalLM": ModelFamily(COHERE_DEFAULTS, _cohere, lambda _: COHERE),
    "Cohere2ForCausalLM": ModelFamily(COHERE2, _cohere2, lambda _: COHERE),
    "Ernie4_5ForCausalLM": ModelFamily(
        ERNIE, lambda raw: {"rope_interleaved": True, **all_biased(bool(raw["use_bias"]))}
    ),
}
