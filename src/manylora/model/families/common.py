"""Reads the parts of config.json that most families share: sizes, rotary positions, windows, activations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manylora.errors import ConfigError

ROPE_NAMES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
DTYPES = ("float32", "float16", "bfloat16")
ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "relu": "relu",
    "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh",
}  # fmt: skip


def read_common(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ModelConfig under their usual names. Raises ConfigError, or KeyError for a missing size."""
    heads, hidden = _size(raw, "num_attention_heads"), _size(raw, "hidden_size")
    return {
        "vocab_size": _size(raw, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": _size(raw, "intermediate_size"),
        "num_layers": _size(raw, "num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": raw.get("head_dim") or hidden // heads,
        "max_position_embeddings": _size(raw, "max_position_embeddings"),
        "norm_eps": raw.get("rms_norm_eps", 1e-6),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "activation": read_activation(raw.get("hidden_act", "silu")),
        "dtype": _dtype(raw),
        **read_rope(raw),
    }


def read_rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Both spellings: `rope_theta` with `rope_scaling`, and `rope_parameters`."""
    scaling = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    kind = "longrope" if kind == "su" else kind
    if kind not in ROPE_NAMES:
        raise ConfigError(
            f"config.json: rope scaling {kind!r} is not supported; supported are {', '.join(ROPE_NAMES)}"
        )
    if scaling:
        scaling["rope_type"] = kind
    if kind == "longrope" and raw.get("original_max_position_embeddings"):
        scaling.setdefault("original_max_position_embeddings", raw["original_max_position_embeddings"])
    share = scaling.get("partial_rotary_factor") or raw.get("partial_rotary_factor")
    return {
        "rope_theta": float(scaling.get("rope_theta") or raw.get("rope_theta") or 10000.0),
        "rope_scaling": scaling or None,
        "partial_rotary_factor": float(share or 1.0),
    }


def read_windows(raw: Mapping[str, Any], sliding: list[bool] | None = None) -> tuple[int | None, ...]:
    """Each layer's window, or () without `sliding_window`. `layer_types` says which layers have one; without
    it, `sliding` does (None: all)."""
    window, num_layers = raw.get("sliding_window"), raw["num_hidden_layers"]
    if window is None:
        return ()
    if raw.get("layer_types"):
        sliding = [kind == "sliding_attention" for kind in raw["layer_types"]]
    if sliding is None:
        sliding = [True] * num_layers
    if len(sliding) != num_layers:
        raise ConfigError(
            f"config.json: layer_types has {len(sliding)} entries for num_hidden_layers {num_layers}"
        )
    return tuple(window if marked else None for marked in sliding)


def read_activation(name: str) -> str:
    """Our name of an activation. Raises ConfigError."""
    if name not in ACTIVATIONS:
        raise ConfigError(
            f"config.json: activation {name!r} is not supported; supported are {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def read_biases(raw: Mapping[str, Any], default: bool = False) -> dict[str, Any]:
    """Those of attention."""
    return dict.fromkeys(("attention_bias", "attention_out_bias"), bool(raw.get("attention_bias", default)))


def refuse(raw: Mapping[str, Any], *names: str) -> None:
    """Raises ConfigError naming the first of these settings that is on: they are not implemented."""
    for name in names:
        if raw.get(name):
            raise ConfigError(f"config.json: {name} {raw[name]!r} is not supported")


def _size(raw: Mapping[str, Any], name: str) -> int:
    value = raw[name]
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"config.json: {name} must be a whole number of at least 1, got {value!r}")
    return value


def _dtype(raw: Mapping[str, Any]) -> str:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(f"config.json: dtype {name!r} is not supported; supported are {', '.join(DTYPES)}")
    return name
