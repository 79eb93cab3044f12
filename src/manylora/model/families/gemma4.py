"""The text models of Gemma 4: layers with and without a window have different head sizes, values are
normalised, too, and each layer's output is scaled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from manylora.config.blocks import LayerInputsConfig, LayerShape
from manylora.config.model import ModelConfig, MoeConfig
from manylora.errors import ConfigError
from manylora.model.families.common import (
    flat_rope,
    read_windows,
    text_settings,
)
from manylora.model.families.family import ModelFamily, TensorNames, text_tower
from manylora.model.families.gemma import GEMMA2, MULTIMODAL
from manylora.model.families.gemma3n import TOWERS, read_shared, shared_kv
from manylora.model.families.moe import checked_moe

GEMMA4 = {
    "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512,
    "num_global_key_value_heads": None, "per_layer_config": None, "attention_k_eq_v": False,
    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "rope_theta": 10000.0,
    "rope_parameters": None, "rope_local_base_freq": 10000.0,
    "attention_bias": False, "sliding_window": 512, "layer_types": None, "final_logit_softcapping": None,
    "use_bidirectional_attention": None, "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 0,
    "vocab_size_per_layer_input": 262144, "use_double_wide_mlp": False,
    "enable_moe_block": False, "num_experts": None, "top_k_experts": None, "moe_intermediate_size": None,
}  # fmt: skip
UNIFIED = {
    **GEMMA4, "max_position_embeddings": 262144, "sliding_window": 1024,
    "use_bidirectional_attention": "vision", "hidden_size_per_layer_input": None,
    "vocab_size_per_layer_input": None, "enable_moe_block": None,
}  # fmt: skip
ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}
NAMES = replace(GEMMA2, scalar="layer_scalar", sparse="", routers=("router.proj",))
EXPERT_NORMS = {
    "mlp_own_post_norm": "post_feedforward_layernorm_1",
    "experts_norm": "pre_feedforward_layernorm_2",
    "experts_post_norm": "post_feedforward_layernorm_2",
}
SIZES = {"head_dim", "num_key_value_heads"}
PARTS = (*TOWERS, "vision_embedder.")


def _gemma4(raw: Mapping[str, Any]) -> dict[str, Any]:
    count, dim = raw["num_hidden_layers"], raw["hidden_size_per_layer_input"]
    windows = read_windows(raw, [(layer + 1) % 6 != 0 for layer in range(count)]) or (None,) * count
    windows = (*windows[:-1], None)  # the last layer never has one, regardless of config.json
    sources = shared_kv(windows, raw["num_kv_shared_layers"])
    readers = {layer for layer, source in enumerate(sources) if source != layer}
    return {
        **read_shared(raw),
        "sliding_windows": windows,
        "kv_sources": sources,
        "layer_shapes": tuple(
            _shape(raw, layer, window is None, layer in readers) for layer, window in enumerate(windows)
        ),
        "layer_inputs": LayerInputsConfig(dim, raw["vocab_size_per_layer_input"], count) if dim else None,
        "moe": _experts(raw) if raw["enable_moe_block"] else None,
    }


def _shape(raw: Mapping[str, Any], layer: int, full: bool, reads_kv: bool) -> LayerShape:
    """The sizes of a layer. Layers without a window have their own: from `per_layer_config`, which
    transformers writes, or else from the keys of the first releases."""
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


def _experts(raw: Mapping[str, Any]) -> MoeConfig:
    """Every layer has experts in addition to its MLP. The names of the MLP do not include them."""
    layers = frozenset(range(raw["num_hidden_layers"]))
    sizes = raw["num_experts"], raw["top_k_experts"], raw["moe_intermediate_size"]
    return checked_moe(MoeConfig(*sizes, True, layers, beside_mlp=True))


def _flat(raw: Mapping[str, Any]) -> dict[str, Any]:
    return flat_rope({**raw, "rope_scaling": None, "rope_parameters": raw.get("rope_parameters") or ROPE})


def _names(config: ModelConfig) -> TensorNames:
    if config.moe is None:
        return NAMES
    return replace(NAMES, block_norms={**NAMES.block_norms, **EXPERT_NORMS})


def _tower(config: ModelConfig) -> TensorNames:
    return text_tower(_names(config), PARTS)


def _multimodal(defaults: Mapping[str, Any]) -> ModelFamily:
    return ModelFamily(MULTIMODAL, _gemma4, _tower, lambda raw: _flat(text_settings(raw, defaults)))


FAMILIES = {
    "Gemma4ForCausalLM": ModelFamily(GEMMA4, _gemma4, _names, _flat),
    "Gemma4ForConditionalGeneration": _multimodal(GEMMA4),
    "Gemma4UnifiedForCausalLM": ModelFamily(UNIFIED, _gemma4, _names, _flat),
    "Gemma4UnifiedForConditionalGeneration": _multimodal(UNIFIED),
}
