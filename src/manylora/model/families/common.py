"""Reads the parts of config.json that most families share: sizes, rotary positions, windows, activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from manylora.errors import ConfigError

ROPE_NAMES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
DTYPES = ("float32", "float16", "bfloat16")
SU = {"su": "longrope"}
ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "relu": "relu", "relu2": "relu2",
    "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh",
}  # fmt: skip


def read_common(raw: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ModelConfig that have the same names in most families. rope: for `read_rope`."""
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
        "norm_eps": raw.get("rms_norm_eps"),
        "tie_word_embeddings": bool(raw["tie_word_embeddings"]),
        "activation": read_activation(raw.get("hidden_act", "silu")),
        **read_rope(raw, **rope),
    }


def read_rope(
    raw: Mapping[str, Any], theta: str = "rope_theta", partial: str = "", renamed: Mapping[str, str] = SU
) -> dict[str, Any]:
    """Reads `rope_theta` with `rope_scaling`, which takes precedence, or `rope_parameters`. theta: the key of
    the base. partial: the key of the rotated share of a head; "": the architecture rotates whole heads,
    whatever config.json says. renamed: old names of scalings -> ours.
    """
    scaling = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    nested = [name for name, value in scaling.items() if isinstance(value, Mapping)]
    if nested:
        raise ConfigError(f"config.json: rope_parameters of {nested[0]} alone is not supported here")
    old = scaling.pop("type", None)
    kind = str(scaling.pop("rope_type", None) or old or "default")
    kind = renamed.get(kind, kind)
    if kind not in ROPE_NAMES:
        raise ConfigError(
            f"config.json: rope scaling {kind!r} is not supported; supported are {', '.join(ROPE_NAMES)}"
        )
    share = scaling.pop("partial_rotary_factor", None)
    base = scaling.pop("rope_theta", None) or raw.get(theta)
    if kind == "proportional":  # rotates whole heads, with a frequency of 0 beyond the share
        scaling["share"], share = 1.0 if share is None else float(share), None
    elif partial:
        share = raw[partial] if share is None else share
    else:
        share = raw.get("partial_rotary_factor") if share is None else share
        if kind != "default" and share not in (None, 1.0):
            raise ConfigError(
                f"config.json: partial_rotary_factor {share} with rope scaling {kind!r} is not supported here"
            )
    if kind in ("llama3", "yarn", "longrope"):
        outer = raw.get("original_max_position_embeddings")
        scaling.setdefault("original_max_position_embeddings", raw["max_position_embeddings"])
        scaling["original_max_position_embeddings"] = outer or scaling["original_max_position_embeddings"]
    return {
        "rope_theta": float(base or 10000.0),
        "rope_scaling": None if kind == "default" else {**scaling, "rope_type": kind},
        "partial_rotary_factor": float(share) if partial and share is not None else 1.0,
    }


def flat_rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Converts rotary parameters per kind of layer to the older flat keys. `rope_local_base_freq` is the base
    of layers with a window, which have no scaling. YaRN's `truncate` is ignored, as in transformers."""
    parameters = raw.get("rope_parameters") or {}
    own = parameters.get("sliding_attention") or {}
    full = {name: one for name, one in (parameters.get("full_attention") or {}).items() if name != "truncate"}
    if own.get("rope_type", "default") != "default":
        raise ConfigError(
            f"config.json: rope scaling {own['rope_type']!r} of sliding_attention is not supported"
        )
    return {
        **raw,
        "rope_local_base_freq": own.get("rope_theta", raw["rope_local_base_freq"]),
        "rope_parameters": {**full, **(raw.get("rope_scaling") or {})},
        "rope_scaling": None,
    }


def text_settings(raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The text part of a multimodal config.json, with the dtype and the head of the whole model."""
    outer = {name: raw.get(name) for name in ("dtype", "torch_dtype", "tie_word_embeddings")}
    return {**defaults, **(raw["text_config"] or {}), **outer}


def windows_but(raw: Mapping[str, Any], number: int) -> tuple[int | None, ...]:
    """`read_windows` where all layers have one but each of this number."""
    count = 0 if raw["sliding_window"] is None or raw["layer_types"] else raw["num_hidden_layers"]
    return read_windows(raw, [(layer + 1) % number != 0 for layer in range(count)])


def read_windows(raw: Mapping[str, Any], sliding: list[bool] | None = None) -> tuple[int | None, ...]:
    """The window of each layer, or () if `sliding_window` is not set. sliding: which layers have one, if
    there is no `layer_types`. None: all, and the architecture does not read `layer_types`.
    """
    window, num_layers = raw["sliding_window"], raw["num_hidden_layers"]
    if window is None:
        return ()
    if sliding is None:
        return (window,) * num_layers
    if raw.get("layer_types"):
        sliding = [kind == "sliding_attention" for kind in raw["layer_types"]]
    check_each(raw, sliding)
    return tuple(window if marked else None for marked in sliding)


def recurrent_layers(
    raw: Mapping[str, Any], kinds: Sequence[str], kind: str = "linear_attention"
) -> frozenset[int]:
    """The layers of this kind; another, one at least, is full_attention. Raises ConfigError."""
    check_each(raw, kinds)
    unknown = set(kinds) - {kind, "full_attention"}
    if unknown:
        raise ConfigError(f"config.json: layer_types has {min(unknown)!r}, which is not supported here")
    if "full_attention" not in kinds:
        raise ConfigError("config.json: layer_types must have full_attention in one layer at least")
    return frozenset(layer for layer, one in enumerate(kinds) if one == kind)


def check_each(raw: Mapping[str, Any], values: Sequence[Any], name: str = "layer_types") -> None:
    """Raises ConfigError unless there is one value for each layer. name: the setting they are from."""
    count = raw["num_hidden_layers"]
    if len(values) != count:
        raise ConfigError(f"config.json: {name} has {len(values)} entries for num_hidden_layers {count}")


def read_activation(name: str) -> str:
    if name not in ACTIVATIONS:
        raise ConfigError(
            f"config.json: activation {name!r} is not supported; supported are {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def read_biases(raw: Mapping[str, Any]) -> dict[str, Any]:
    return dict.fromkeys(("attention_bias", "attention_out_bias"), bool(raw["attention_bias"]))


def all_biased(biased: bool) -> dict[str, Any]:
    return dict.fromkeys(("attention_bias", "attention_out_bias", "mlp_bias"), biased)


def refuse(raw: Mapping[str, Any], *names: str) -> None:
    for name in names:
        if raw.get(name):
            raise ConfigError(f"config.json: {name} {raw[name]!r} is not supported")


def _size(raw: Mapping[str, Any], name: str) -> int:
    value = raw[name]
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"config.json: {name} must be a whole number of at least 1, got {value!r}")
    return value


def read_dtype(raw: Mapping[str, Any]) -> str | None:
    """The checkpoint's dtype, or None if config.json does not have it. Raises ConfigError."""
    found = raw.get("dtype") or raw.get("torch_dtype")
    if not found:
        return None
    name = str(found).removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(f"config.json: dtype {name!r} is not supported; supported are {', '.join(DTYPES)}")
    return name
