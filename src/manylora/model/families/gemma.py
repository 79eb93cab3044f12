"""Gemma 1 to 4 and 3n, as text models.

Gemma 3n has AltUp and LAuReL, per-layer embeddings, shared keys and values, and a sparse gate. In Gemma 4,
layers with and without a window have different head sizes, and each layer's output is scaled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from manylora.config.blocks import AltUpConfig, LayerInputsConfig, LayerShape
from manylora.config.model import ModelConfig, MoeConfig
from manylora.errors import ConfigError
from manylora.model.families.common import flat_rope, read_activation, read_biases, text_settings, windows_but
from manylora.model.families.family import ModelFamily, TensorNames, text_tower
from manylora.model.families.moe import checked_moe

GEMMA2 = TensorNames(
    block_norms={
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }
)
GEMMA = {
    "vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 8192, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "rope_theta": 10000.0, "attention_bias": False,
}  # fmt: skip
GEMMA2_DEFAULTS = {
    **GEMMA, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "layer_types": None,
    "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0,
}  # fmt: skip
GEMMA3 = {
    **GEMMA2_DEFAULTS, "vocab_size": 262208, "max_position_embeddings": 131072, "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6, "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
}  # fmt: skip
WITHOUT_HEAD = {"makes_text": False, "tie_word_embeddings": True}
ENCODER = {**WITHOUT_HEAD, "bidirectional": True}
MULTIMODAL = {"text_config": None, "tie_word_embeddings": True}


def _gemma(raw: Mapping[str, Any]) -> dict[str, Any]:
    # The first releases specify gelu, but were trained with its tanh approximation.
    name = "gelu_pytorch_tanh" if raw["hidden_act"] == "gelu" else raw["hidden_act"]
    return {**_shared(raw), "activation": read_activation(name)}


def _shared(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "norm": "rms_plus_one",
        "embedding_scale": float(raw["hidden_size"]) ** 0.5,
        **read_biases(raw),
    }


def _gemma3(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Layers with a window have a rotary base of their own. If bidirectional, it is on both sides."""
    if raw.get("use_bidirectional_attention"):
        raw = {**raw, "sliding_window": raw["sliding_window"] // 2 + 1}
    return {
        **_capped(raw),
        "attention_softcap": None,  # transformers reads attn_logit_softcapping and does not use it
        **(ENCODER if raw.get("use_bidirectional_attention") else {}),
        "rope_local_theta": float(raw["rope_local_base_freq"]),
        "qk_norm": "head",
        "sliding_windows": windows_but(raw, raw["sliding_window_pattern"]),
    }


def _capped(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_shared(raw),
        "activation": read_activation(raw["hidden_activation"]),
        "attention_scale": float(raw["query_pre_attn_scalar"]) ** -0.5,
        "attention_softcap": raw["attn_logit_softcapping"],
        "logits_softcap": raw["final_logit_softcapping"],
    }


GEMMA3N = {
    "vocab_size": 262400, "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 35,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
    "attention_bias": False, "sliding_window": 512, "layer_types": None, "final_logit_softcapping": 30.0,
    "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256, "altup_active_idx": 0,
    "altup_correct_scale": True, "altup_num_inputs": 4, "num_kv_shared_layers": 15, "laurel_rank": 64,
    "activation_sparsity_pattern": None,
}  # fmt: skip
TOWERS = ("audio_tower.", "embed_vision.", "embed_audio.")  # in addition to the vision tower


def _gemma3n_settings(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replaces the list of MLP sizes, one per layer, with a single size."""
    inner = raw["intermediate_size"]
    if isinstance(inner, Sequence) and inner:
        if len(inner) != raw["num_hidden_layers"] or len(set(inner)) > 1:
            raise ConfigError(
                "config.json: intermediate_size must be the same for each of num_hidden_layers layers, "
                f"got {list(inner)}"
            )
        inner = inner[0]
    return flat_rope({**raw, "intermediate_size": inner})


def _gemma3n(raw: Mapping[str, Any]) -> dict[str, Any]:
    count = raw["num_hidden_layers"]
    windows = windows_but(raw, 5)
    pattern = raw["activation_sparsity_pattern"]
    if pattern is None:  # the first ten of more than ten layers are sparse
        sparse = 10 if count > 10 else 0
        pattern = [0.95] * sparse + [0.0] * (count - sparse)
    if len(pattern) != count or not all(0 <= share < 1 for share in pattern):
        raise ConfigError(
            f"config.json: activation_sparsity_pattern must be {count} numbers from 0 to less than 1, "
            f"got {list(pattern)}"
        )
    streams, active = raw["altup_num_inputs"], raw["altup_active_idx"]
    if not 1 < streams <= count + 1 or not 0 <= active < streams:
        raise ConfigError(
            f"config.json: altup_num_inputs must be from 2 to num_hidden_layers + 1, and altup_active_idx "
            f"less than it, got {streams} and {active}"
        )
    return {
        **read_shared(raw),
        "sliding_windows": windows,
        "kv_sources": shared_kv(windows, raw["num_kv_shared_layers"]),
        "sparsity": tuple(pattern) if any(pattern) else (),
        "layer_inputs": LayerInputsConfig(
            raw["hidden_size_per_layer_input"], raw["vocab_size_per_layer_input"], count
        ),
        "altup": AltUpConfig(streams, active, bool(raw["altup_correct_scale"]), raw["laurel_rank"]),
    }


def read_shared(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "norm": "rms_wide",
        "embedding_scale": float(raw["hidden_size"]) ** 0.5,
        "activation": read_activation(raw["hidden_activation"]),
        "attention_scale": 1.0,
        "logits_softcap": raw["final_logit_softcapping"],
        "rope_local_theta": float(raw["rope_local_base_freq"]),
        "qk_norm": "head",
        "v_norm": True,
        **read_biases(raw),
    }


def shared_kv(kinds: Sequence[object], shared: int) -> tuple[int, ...]:
    """For each layer, the layer whose keys and values it reads. Each of the last `shared` layers reads those
    of the last earlier layer of the same kind. kinds: one value per layer. Raises ConfigError."""
    first = len(kinds) - shared
    if not 0 < first <= len(kinds):
        raise ConfigError(
            f"config.json: num_kv_shared_layers must be from 0 to {len(kinds) - 1}, got {shared}"
        )
    last = {kind: layer for layer, kind in enumerate(kinds[:first])}
    missing = [layer for layer, kind in enumerate(kinds) if kind not in last]
    if missing:
        raise ConfigError(
            f"config.json: layer {missing[0]} has no layer of its layer_types before the "
            f"{shared} of num_kv_shared_layers whose keys and values it could read"
        )
    return tuple(layer if layer < first else last[kind] for layer, kind in enumerate(kinds)) if shared else ()


GEMMA4 = {
    "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512,
    "num_global_key_value_heads": None, "per_layer_config": None, "attention_k_eq_v": False,
    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "rope_theta": 10000.0, "rope_parameters": None,
    "rope_local_base_freq": 10000.0, "attention_bias": False, "sliding_window": 512, "layer_types": None,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": None, "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 0,
    "vocab_size_per_layer_input": 262144, "use_double_wide_mlp": False,
    "enable_moe_block": False, "num_experts": None, "top_k_experts": None, "moe_intermediate_size": None,
}  # fmt: skip
GEMMA4_UNIFIED = {
    **GEMMA4, "max_position_embeddings": 262144, "sliding_window": 1024,
    "use_bidirectional_attention": "vision", "hidden_size_per_layer_input": None,
    "vocab_size_per_layer_input": None, "enable_moe_block": None,
}  # fmt: skip
GEMMA4_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}
GEMMA4_NAMES = replace(GEMMA2, scalar="layer_scalar", sparse="", routers=("router.proj",))
EXPERT_NORMS = {
    "mlp_own_post_norm": "post_feedforward_layernorm_1",
    "experts_norm": "pre_feedforward_layernorm_2",
    "experts_post_norm": "post_feedforward_layernorm_2",
}
SIZES = {"head_dim", "num_key_value_heads"}
GEMMA4_PARTS = (*TOWERS, "vision_embedder.")


def _gemma4(raw: Mapping[str, Any]) -> dict[str, Any]:
    count, dim = raw["num_hidden_layers"], raw["hidden_size_per_layer_input"]
    windows = windows_but(raw, 6) or (None,) * count
    windows = (*windows[:-1], None)  # the last layer never has one, regardless of config.json
    sources = shared_kv(windows, raw["num_kv_shared_layers"])
    readers = {layer for layer, source in enumerate(sources) if source != layer}
    moe = None
    if raw["enable_moe_block"]:  # every layer has experts in addition to its MLP
        sizes = raw["num_experts"], raw["top_k_experts"], raw["moe_intermediate_size"]
        moe = checked_moe(MoeConfig(*sizes, True, frozenset(range(count)), beside_mlp=True))
    return {
        **read_shared(raw),
        "sliding_windows": windows,
        "kv_sources": sources,
        "layer_shapes": tuple(
            _gemma4_shape(raw, layer, window is None, layer in readers)
            for layer, window in enumerate(windows)
        ),
        "layer_inputs": LayerInputsConfig(dim, raw["vocab_size_per_layer_input"], count) if dim else None,
        "moe": moe,
    }


def _gemma4_shape(raw: Mapping[str, Any], layer: int, full: bool, reads_kv: bool) -> LayerShape:
    """Layers without a window have other sizes: in `per_layer_config`, or in the first releases' keys."""
    one = raw["attention_k_eq_v"]
    own: dict[str, Any] = {}
    if raw["per_layer_config"] is not None:
        named = {int(number): own for number, own in raw["per_layer_config"].items()}  # keys may be like "05"
        own = dict(named.get(layer) or {})
    elif full:
        heads = raw["num_global_key_value_heads"] if one else None
        own = {"head_dim": raw["global_head_dim"], **({"num_key_value_heads": heads} if heads else {})}
    unknown = sorted(own.keys() - SIZES)
    if unknown:
        raise ConfigError(f"config.json: {unknown[0]} in per_layer_config is not supported")
    own = {name: own.get(name, raw[name]) for name in SIZES}
    for name, size in own.items():
        if not isinstance(size, int) or size < 1:
            raise ConfigError(
                f"config.json: {name} of layer {layer} must be a whole number of at least 1, got {size!r}"
            )
    return LayerShape(
        head_dim=own["head_dim"],
        num_kv_heads=own["num_key_value_heads"],
        intermediate_size=raw["intermediate_size"] * (2 if reads_kv and raw["use_double_wide_mlp"] else 1),
        keys_are_values=bool(one and full),
    )


def _gemma4_settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    return flat_rope(
        {**raw, "rope_scaling": None, "rope_parameters": raw.get("rope_parameters") or GEMMA4_ROPE}
    )


def _gemma4_names(config: ModelConfig) -> TensorNames:
    if config.moe is None:
        return GEMMA4_NAMES
    return replace(GEMMA4_NAMES, block_norms={**GEMMA4_NAMES.block_norms, **EXPERT_NORMS})


def _gemma4_multimodal(defaults: Mapping[str, Any]) -> ModelFamily:
    return ModelFamily(
        MULTIMODAL,
        _gemma4,
        lambda config: text_tower(_gemma4_names(config), GEMMA4_PARTS),
        lambda raw: _gemma4_settings(text_settings(raw, defaults)),
    )


FAMILIES = {
    "GemmaForCausalLM": ModelFamily(GEMMA, _gemma),
    "Gemma2ForCausalLM": ModelFamily(
        GEMMA2_DEFAULTS,
        lambda raw: {**_capped(raw), "sliding_windows": windows_but(raw, 2)},
        lambda _: GEMMA2,
    ),
    "Gemma3ForCausalLM": ModelFamily(GEMMA3, _gemma3, lambda _: GEMMA2, flat_rope),
    "Gemma3TextModel": ModelFamily(
        GEMMA3,
        lambda raw: {**_gemma3(raw), **WITHOUT_HEAD},  # such as EmbeddingGemma
        lambda _: replace(GEMMA2, unused=("2_Dense.", "3_Dense.")),
        flat_rope,
    ),
    "Gemma3ForConditionalGeneration": ModelFamily(
        MULTIMODAL,
        _gemma3,
        lambda _: text_tower(GEMMA2),
        lambda raw: flat_rope(text_settings(raw, GEMMA3)),
    ),
    "Gemma3nForCausalLM": ModelFamily(GEMMA3N, _gemma3n, lambda _: GEMMA2, _gemma3n_settings),
    "Gemma3nForConditionalGeneration": ModelFamily(
        MULTIMODAL,
        _gemma3n,
        lambda _: text_tower(GEMMA2, TOWERS),
        lambda raw: _gemma3n_settings(text_settings(raw, GEMMA3N)),
    ),
    "Gemma4ForCausalLM": ModelFamily(GEMMA4, _gemma4, _gemma4_names, _gemma4_settings),
    "Gemma4ForConditionalGeneration": _gemma4_multimodal(GEMMA4),
    "Gemma4UnifiedForCausalLM": ModelFamily(GEMMA4_UNIFIED, _gemma4, _gemma4_names, _gemma4_settings),
    "Gemma4UnifiedForConditionalGeneration": _gemma4_multimodal(GEMMA4_UNIFIED),
}
