"""What a Hugging Face directory says of its model: config.json and generation_config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manylora.config import ModelConfig
from manylora.errors import ConfigError

__all__ = ["SUPPORTED", "read_model_config"]

SUPPORTED = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPE_NAMES = ("default", "linear", "dynamic", "llama3", "yarn")
DTYPES = ("float32", "float16", "bfloat16")


def read_model_config(model_dir: Path) -> ModelConfig:
    """The decoder's shape. Raises ConfigError naming what is missing or not supported."""
    model_dir = Path(model_dir)
    if not model_dir.is_dir():
        raise ConfigError(f"the model directory {model_dir} does not exist")
    raw = _read_json(model_dir / "config.json", required=True)
    architecture = (raw.get("architectures") or ["none"])[0]
    if architecture not in SUPPORTED:
        raise ConfigError(
            f"{model_dir}/config.json: architecture {architecture} is not supported; supported are "
            + ", ".join(SUPPORTED)
        )
    if raw.get("quantization_config"):
        raise ConfigError(f"{model_dir}/config.json: quantised checkpoints are not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(
            f"{model_dir}/config.json: hidden_act {raw['hidden_act']!r} is not supported, silu is"
        )
    try:
        return _parse(architecture, raw, _eos_ids(raw, model_dir))
    except KeyError as error:
        raise ConfigError(f"{model_dir}/config.json lacks {error}") from error


def _parse(architecture: str, raw: Mapping[str, Any], eos: tuple[int, ...]) -> ModelConfig:
    num_heads = raw["num_attention_heads"]
    num_layers = raw["num_hidden_layers"]
    theta, scaling = _rope(raw)
    qwen2 = architecture == "Qwen2ForCausalLM"
    llama = architecture == "LlamaForCausalLM"
    bias = qwen2 or bool(raw.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=raw.get("num_key_value_heads") or num_heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // num_heads,
        max_position_embeddings=raw["max_position_embeddings"],
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        dtype=_dtype(raw),
        rope_scaling=scaling,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=bias and architecture != "MistralForCausalLM",
        attention_out_bias=bool(raw.get("attention_bias", False)) and not qwen2,
        mlp_bias=llama and bool(raw.get("mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        sliding_windows=_windows(architecture, raw, num_layers),
        eos_token_ids=eos,
    )


def _rope(raw: Mapping[str, Any]) -> tuple[float, Mapping[str, Any] | None]:
    """Both spellings: `rope_theta` with `rope_scaling`, and `rope_parameters`."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling")
    kind = (scaling or {}).get("rope_type", (scaling or {}).get("type", "default"))
    if kind not in ROPE_NAMES:
        raise ConfigError(
            f"config.json: rope scaling {kind!r} is not supported; supported are {', '.join(ROPE_NAMES)}"
        )
    theta = (scaling or {}).get("rope_theta") or raw.get("rope_theta") or 10000.0
    return float(theta), scaling


def _windows(architecture: str, raw: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    window = raw.get("sliding_window")
    if architecture == "LlamaForCausalLM" or window is None:
        return ()
    if architecture == "MistralForCausalLM":
        return (window,) * num_layers
    if not raw.get("use_sliding_window", False):
        return ()
    types = raw.get("layer_types")
    if types:
        return tuple(window if t == "sliding_attention" else None for t in types)
    first = raw.get("max_window_layers", 0)
    return tuple(window if layer >= first else None for layer in range(num_layers))


def _dtype(raw: Mapping[str, Any]) -> str:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(f"config.json: dtype {name!r} is not supported; supported are {', '.join(DTYPES)}")
    return name


def _eos_ids(raw: Mapping[str, Any], model_dir: Path) -> tuple[int, ...]:
    eos = _read_json(model_dir / "generation_config.json").get("eos_token_id", raw.get("eos_token_id"))
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)


def _read_json(path: Path, required: bool = False) -> dict[str, Any]:
    if not path.is_file():
        if required:
            raise ConfigError(f"{path} does not exist: a Hugging Face model directory is needed")
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
