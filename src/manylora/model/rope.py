"""Rotary frequencies of the released checkpoints: default, linear, dynamic, llama3, yarn, longrope."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from manylora.config.engine import ModelConfig
from manylora.errors import ConfigError

Rope = tuple[Tensor, float]  # inverse frequencies [rotary_dim / 2], and the factor on cos and sin


def rope_frequencies(config: ModelConfig, max_seq_len: int | None = None, local: bool = False) -> Rope:
    """Inverse frequencies [rotary_dim / 2] float32 and the attention factor that scales cos and sin.

    max_seq_len: the longest sequence served (None: what the model allows). It selects longrope's factors once
    for all sequences, since cached keys must not depend on how long a sequence will get. local: for layers
    with a window, where these have a separate base.
    """
    if local:
        assert config.rope_local_theta is not None
        return _plain(config, config.rope_local_theta), 1.0
    scaling = dict(config.rope_scaling or {})
    scaling["max_seq_len"] = max_seq_len or config.max_position_embeddings
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    try:
        return ROPE_TYPES[kind](config, scaling)
    except KeyError as error:
        raise ConfigError(f"config.json: rope scaling {kind!r} lacks {error}") from error


def _plain(config: ModelConfig, theta: float | None = None) -> Tensor:
    return 1.0 / _periods(config, theta)


def _periods(config: ModelConfig, theta: float | None = None) -> Tensor:
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.int64).float() / config.rotary_dim
    return (theta or config.rope_theta) ** exponents


def _default(config: ModelConfig, scaling: dict) -> Rope:
    """Also `dynamic`: it differs only beyond max_position_embeddings, which the engine does not reach."""
    return _plain(config), 1.0


def _linear(config: ModelConfig, scaling: dict) -> Rope:
    return _plain(config) / scaling["factor"], 1.0


def _llama3(config: ModelConfig, scaling: dict) -> Rope:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    plain, factor = _plain(config), scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    context = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / plain
    smooth = (context / wavelength - low) / (high - low)
    blended = (1 - smooth) * plain / factor + smooth * plain
    stretched = torch.where(wavelength > context / low, plain / factor, blended)
    return torch.where(wavelength < context / high, plain, stretched), 1.0


def _yarn(config: ModelConfig, scaling: dict) -> Rope:
    dim, base = config.rotary_dim, config.rope_theta
    context = scaling.get("original_max_position_embeddings") or config.max_position_embeddings
    factor = scaling.get("factor") or config.max_position_embeddings / context

    def correction(rotations: float) -> float:
        return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = correction(scaling.get("beta_fast") or 32), correction(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    keep = 1 - ramp.clamp(0, 1)
    plain = _plain(config)
    return plain / factor * (1 - keep) + plain * keep, _yarn_attention(scaling, factor)


def _yarn_attention(scaling: dict, factor: float) -> float:
    def magnitude(m: float) -> float:
        return 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return magnitude(scaling["mscale"]) / magnitude(scaling["mscale_all_dim"])
    return magnitude(1.0)


def _longrope(config: ModelConfig, scaling: dict) -> Rope:
    """One factor for each frequency: the long ones when sequences may outgrow the original context."""
    context = scaling["original_max_position_embeddings"]
    chosen = scaling["long_factor" if scaling["max_seq_len"] > context else "short_factor"]
    periods = _periods(config)
    if len(chosen) != len(periods):
        raise ConfigError(
            f"config.json: longrope needs {len(periods)} factors, one for each frequency, got {len(chosen)}"
        )
    stretch = scaling.get("factor") or config.max_position_embeddings / context
    attention = scaling.get("attention_factor")
    if attention is None:
        attention = math.sqrt(1 + math.log(stretch) / math.log(context)) if stretch > 1 else 1.0
    # Rounded once after the product, as the models were trained.
    return 1.0 / (torch.tensor(chosen, dtype=torch.float32) * periods), float(attention)


ROPE_TYPES: dict[str, Callable[[ModelConfig, dict], Rope]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _default,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
