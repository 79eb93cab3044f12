"""Mixtures of experts: like Llama, but with a router and several small MLPs instead of one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manylora.config.blocks import RoutingConfig
from manylora.config.model import MoeConfig
from manylora.errors import ConfigError
from manylora.model.families.common import read_biases, read_windows, refuse, windows_but
from manylora.model.families.family import ModelFamily, TensorNames
from manylora.model.families.llama import GRANITE, MISTRAL, PLAIN, read_granite

MIXTRAL_DEFAULTS = {
    **MISTRAL, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "sliding_window": None,
    "num_experts_per_tok": 2, "num_local_experts": 8,
}  # fmt: skip
QWEN_MOE = {
    **PLAIN, "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 24,
    "max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096,
    "decoder_sparse_step": 1, "norm_topk_prob": False, "mlp_only_layers": None,
}  # fmt: skip
QWEN2_MOE = {
    **QWEN_MOE, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16,
    "max_window_layers": 28, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
    "num_experts_per_tok": 4, "num_experts": 60, "qkv_bias": True, "layer_types": None,
}  # fmt: skip
QWEN3_MOE = {
    **QWEN_MOE, "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4,
    "moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_experts": 128, "attention_bias": False,
}  # fmt: skip
OLMOE_DEFAULTS = {
    **PLAIN, "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16,
    "num_attention_heads": 16, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "attention_bias": False, "clip_qkv": None, "num_experts_per_tok": 8, "num_experts": 64,
    "norm_topk_prob": False,
}  # fmt: skip
GRANITE_MOE = {**GRANITE, "num_local_experts": 8, "num_experts_per_tok": 2}
GRANITE_MOE_SHARED = {**GRANITE_MOE, "shared_intermediate_size": 0}
GRANITE_NAMES = TensorNames(
    sparse="block_sparse_moe",
    routers=("router.layer", "router"),
    shared=("shared_mlp.input_linear", "shared_mlp.output_linear"),
)

ERNIE_MOE = {
    **PLAIN, "vocab_size": 103424, "hidden_size": 2560, "intermediate_size": 12288, "num_hidden_layers": 28,
    "num_attention_heads": 20, "num_key_value_heads": 4, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 500000.0, "use_bias": False,
    "moe_intermediate_size": 1536, "moe_k": 6, "moe_num_experts": 64, "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1, "moe_norm_min": 1e-12,
}  # fmt: skip
STATICS = "moe_statics.e_score_correction_bias"
ERNIE_NAMES = TensorNames(
    unused=("model.mtp",), shared_block="shared_experts", corrections=(STATICS, f"gate.{STATICS}")
)
MIXTRAL = TensorNames(sparse="block_sparse_moe", expert_up_gate=("w3", "w1"), expert_down="w2")


def _everywhere(raw: Mapping[str, Any], count: int, **more: Any) -> MoeConfig | None:
    sizes = count, raw["num_experts_per_tok"], raw["intermediate_size"]
    more = {"norm_topk_prob": True, "layers": frozenset(range(raw["num_hidden_layers"])), **more}
    return checked_moe(MoeConfig(*sizes, **more))


def granite_experts(raw: Mapping[str, Any]) -> MoeConfig | None:
    """Granite's experts, which are weighted by the softmax over the chosen experts' scores."""
    shared = {"shared_intermediate_size": raw.get("shared_intermediate_size") or 0, "shared_gated": False}
    return _everywhere(raw, raw["num_local_experts"], **shared)


def _ernie(raw: Mapping[str, Any]) -> dict[str, Any]:
    refuse(raw, "use_bias")
    count, first, step = raw["num_hidden_layers"], raw["moe_layer_start_index"], raw["moe_layer_interval"]
    last = raw["moe_layer_end_index"] if raw["moe_layer_end_index"] != -1 else count - 1
    layers = frozenset(i for i in range(count) if first <= i <= last and (i + 1) % step == 0)
    routing = RoutingConfig(corrected=True, least=float(raw["moe_norm_min"]), wide=True)
    inner = raw["moe_intermediate_size"]
    shared = inner * (raw["moe_num_shared_experts"] or 0)
    moe = MoeConfig(
        raw["moe_num_experts"], raw["moe_k"], inner, True, layers, shared, shared_gated=False, routing=routing
    )
    return {"rope_interleaved": True, "moe": checked_moe(moe)}


def _qwen2_moe(raw: Mapping[str, Any]) -> dict[str, Any]:
    windows: tuple[int | None, ...] = ()
    if raw["use_sliding_window"]:
        first = raw["max_window_layers"]
        marked = [layer % 2 == 0 and layer < first for layer in range(raw["num_hidden_layers"])]
        windows = read_windows(raw, marked)
    moe = qwen_experts(raw, raw["shared_expert_intermediate_size"])
    return {"attention_bias": bool(raw["qkv_bias"]), "sliding_windows": windows, "moe": moe}


def _granite_moe(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {**read_granite(raw), **read_biases(raw), "moe": granite_experts(raw)}


def qwen_experts(raw: Mapping[str, Any], shared: int = 0) -> MoeConfig | None:
    """Every `decoder_sparse_step`-th layer has experts, except those in `mlp_only_layers`."""
    count, step, plain = raw["num_experts"], raw["decoder_sparse_step"], raw["mlp_only_layers"] or ()
    if step < 1:
        raise ConfigError(f"config.json: decoder_sparse_step must be at least 1, got {step}")
    numbers = range(raw["num_hidden_layers"])
    layers = frozenset(i for i in numbers if count > 0 and i not in plain and (i + 1) % step == 0)
    sizes = count, raw["num_experts_per_tok"], raw["moe_intermediate_size"]
    return checked_moe(MoeConfig(*sizes, bool(raw["norm_topk_prob"]), layers, shared))


def checked_moe(moe: MoeConfig) -> MoeConfig | None:
    """None if no layer has experts. Raises ConfigError."""
    if not moe.layers:
        return None
    if not 1 <= moe.top_k <= moe.num_experts:
        raise ConfigError(
            f"config.json: num_experts_per_tok must be 1 to the number of experts ({moe.num_experts}), "
            f"got {moe.top_k}"
        )
    return moe


YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
GPT_OSS = {
    **PLAIN, "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "sliding_window": 128, "layer_types": None,
    "attention_bias": True, "num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}  # fmt: skip
GPT_OSS_NAMES = TensorNames(sinks="self_attn.sinks", routers=("router",))


def _gpt_oss(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The experts of a token are weighted by the softmax over their scores alone."""
    swiglu = float(raw["swiglu_alpha"]), float(raw["swiglu_limit"])
    if not swiglu[1] > 0:
        raise ConfigError(f"config.json: swiglu_limit must be more than 0, got {raw['swiglu_limit']!r}")
    more = {"biased": True, "interleaved": True, "swiglu": swiglu}
    return {
        **read_biases(raw),
        "norm": "rms_wide",
        "attention_sinks": True,
        "sliding_windows": windows_but(raw, 2),
        "moe": _everywhere(raw, raw["num_local_experts"], **more),
    }


FAMILIES = {
    "MixtralForCausalLM": ModelFamily(
        MIXTRAL_DEFAULTS,
        lambda raw: {
            "sliding_windows": read_windows(raw),
            "moe": _everywhere(raw, raw["num_local_experts"]),
        },
        lambda _: MIXTRAL,
        aliases={"num_experts": "num_local_experts"},
    ),
    "Ernie4_5_MoeForCausalLM": ModelFamily(
        ERNIE_MOE,
        _ernie,
        lambda _: ERNIE_NAMES,
        aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    ),
    "GraniteMoeForCausalLM": ModelFamily(GRANITE_MOE, _granite_moe, lambda _: GRANITE_NAMES),
    "GraniteMoeSharedForCausalLM": ModelFamily(GRANITE_MOE_SHARED, _granite_moe, lambda _: GRANITE_NAMES),
    "OlmoeForCausalLM": ModelFamily(
        OLMOE_DEFAULTS,
        lambda raw: {
            **read_biases(raw),
            "qk_norm": "all",
            "qkv_clip": raw["clip_qkv"],
            "moe": _everywhere(raw, raw["num_experts"], norm_topk_prob=bool(raw["norm_topk_prob"])),
        },
        aliases={"num_local_experts": "num_experts"},
    ),
    "Qwen2MoeForCausalLM": ModelFamily(QWEN2_MOE, _qwen2_moe),
    "Qwen3MoeForCausalLM": ModelFamily(
        QWEN3_MOE,
        lambda raw: {
            **read_biases(raw),
            "qk_norm": "head",
            "sliding_windows": read_windows(raw) if raw["use_sliding_window"] else (),
            "moe": qwen_experts(raw),
        },
        aliases={"num_local_experts": "num_experts"},
    ),
    "GptOssForCausalLM": ModelFamily(
        GPT_OSS,
        _gpt_oss,
        lambda _: GPT_OSS_NAMES,
        lambda raw: {**raw, "rope_parameters": raw.get("rope_parameters") or YARN},
        aliases={"num_experts": "num_local_experts"},
    ),
}
