"""The text models of Llama 4: attention in chunks, layers without rotary positions, mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manylora.config.blocks import RoutingConfig
from manylora.config.model import MoeConfig
from manylora.errors import ConfigError
from manylora.model.families.common import read_biases, text_settings
from manylora.model.families.family import ModelFamily, TensorNames, text_tower
from manylora.model.families.llama import PLAIN
from manylora.model.families.moe import checked_moe

LLAMA4_NAMES = TensorNames(
    up_gate=("feed_forward.up_proj", "feed_forward.gate_proj"),
    down="feed_forward.down_proj",
    sparse="feed_forward",
    routers=("router",),
)
LLAMA4 = {
    **PLAIN, "vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192,
    "intermediate_size_mlp": 16384, "num_hidden_layers": 48, "num_attention_heads": 40,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "num_experts_per_tok": 1, "num_local_experts": 16,
    "moe_layers": None, "interleave_moe_layer_step": 1, "use_qk_norm": True, "no_rope_layers": None,
    "no_rope_layer_interval": 4, "attention_chunk_size": 8192, "layer_types": None,
    "attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1, "attention_bias": False,
}  # fmt: skip


def _llama4(raw: Mapping[str, Any]) -> dict[str, Any]:
    count, interval = raw["num_hidden_layers"], raw["no_rope_layer_interval"]
    rotated = raw["no_rope_layers"] or [int((layer + 1) % interval != 0) for layer in range(count)]
    kinds = raw["layer_types"] or ["chunked_attention" if one else "full_attention" for one in rotated]
    if len(rotated) != count or len(kinds) != count:
        raise ConfigError(
            f"config.json: no_rope_layers and layer_types have {len(rotated)} and {len(kinds)} entries for "
            f"num_hidden_layers {count}"
        )
    chunked = [kind == "chunked_attention" for kind in kinds]
    if chunked != [bool(one) for one in rotated] and any(chunked):
        raise ConfigError("config.json: layer_types other than chunked where rotated are not supported")
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    plain = kind == "longrope" and scaling.get("attention_factor") == 1  # as of a GGUF file
    # Others scale queries and keys, which are normalised later.
    if not plain and kind not in ("default", "linear", "llama3"):
        raise ConfigError(f"config.json: rope scaling {kind!r} is not supported here")
    tuned = raw["attn_temperature_tuning"]
    step, layers, inner = raw["interleave_moe_layer_step"], raw["moe_layers"], raw["intermediate_size"]
    if layers is None:
        layers = range(step - 1, count, step)
    moe = None
    if list(layers):
        moe = MoeConfig(
            raw["num_local_experts"], raw["num_experts_per_tok"], inner, norm_topk_prob=False,
            layers=frozenset(layers), shared_intermediate_size=inner, shared_gated=False,
            routing=RoutingConfig("top"), transposed=True,
        )  # fmt: skip
    return {
        **read_biases(raw),
        "intermediate_size": raw["intermediate_size_mlp"],
        "rope_interleaved": True,
        "unrotated_layers": frozenset(layer for layer, one in enumerate(rotated) if not one),
        "unrotated_growth": (float(raw["attn_scale"]), int(raw["floor_scale"])) if tuned else None,
        "attention_chunk": raw["attention_chunk_size"] if any(chunked) else None,
        "qk_norm": "plain" if raw["use_qk_norm"] else "",
        "moe": None if moe is None else checked_moe(moe),
    }


FAMILIES = {
    "Llama4ForCausalLM": ModelFamily(LLAMA4, _llama4, lambda _: LLAMA4_NAMES),
    "Llama4ForConditionalGeneration": ModelFamily(
        {"text_config": None, "tie_word_embeddings": False},
        _llama4,
        lambda _: text_tower(LLAMA4_NAMES, ("vision_model.",)),
        lambda raw: text_settings(raw, LLAMA4),
    ),
}
