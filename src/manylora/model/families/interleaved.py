"""GLM-4, Cohere and ERNIE 4.5: rotary positions rotate pairs of adjacent elements of a head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from manylora.model.families.common import all_biased, read_biases, read_windows
from manylora.model.families.family import ModelFamily, TensorNames
from manylora.model.families.llama import PLAIN

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
    count, pattern = raw["num_hidden_layers"], raw["sliding_window_pattern"]
    windows = read_windows(raw, [(layer + 1) % pattern != 0 for layer in range(count)])
    rotated = {layer for layer, window in enumerate(windows) if window is not None}
    return {
        **_cohere({**raw, "use_qk_norm": False}),
        "sliding_windows": windows,
        "unrotated_layers": frozenset(range(count)) - rotated,
    }


FAMILIES = {
    "GlmForCausalLM": ModelFamily(GLM_DEFAULTS, _glm, lambda _: GLM, rope=GLM_ROPE),
    "Glm4ForCausalLM": ModelFamily(GLM_DEFAULTS, _glm, lambda _: GLM4, rope=GLM_ROPE),
    "CohereForCausalLM": ModelFamily(COHERE_DEFAULTS, _cohere, lambda _: COHERE),
    "Cohere2ForCausalLM": ModelFamily(COHERE2, _cohere2, lambda _: COHERE),
    "Ernie4_5ForCausalLM": ModelFamily(
        ERNIE, lambda raw: {"rope_interleaved": True, **all_biased(bool(raw["use_bias"]))}
    ),
}
