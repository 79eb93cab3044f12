"""Rotary positions of released checkpoints: default, linear, dynamic, llama3, yarn, longrope, proportional.

`dynamic` and `longrope` rotate a token by the length that its sequence has when the token is computed, as in
transformers: prompt tokens by the prompt's length, each later token by its own position + 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from manylora.config.model import ModelConfig
from manylora.errors import ConfigError
from manylora.kernels.decode_step import PlacedRotary

LEAST_KEPT, MOST_KEPT = 256, 8192  # positions in a table; 8 MiB for heads of 128


@dataclass(frozen=True)
class Rope:
    """A way to rotate. frequencies: inverse, [rotary_dim / 2] float32. factor: on cos and sin.

    by_length: from lengths [T] int64 to frequencies [T, rotary_dim / 2] of each row; None: all the same.
    """

    frequencies: Tensor
    factor: float = 1.0
    by_length: Callable[[Tensor], Tensor] | None = None

    def angles(self, positions: Tensor, lengths: Tensor | None) -> Tensor:
        """[T, rotary_dim] float32. positions [T]. lengths [T]; None: positions + 1."""
        frequencies = self.frequencies
        if self.by_length is not None:
            frequencies = self.by_length(positions + 1 if lengths is None else lengths)
        angles = positions.float().unsqueeze(1) * frequencies
        return torch.cat((angles, angles), dim=-1)


class RotaryTable:
    """The rotation of rows. On a CPU it is kept for each position: a dozen torch calls are slower."""

    def __init__(self, rope: Rope, dtype: torch.dtype, device: torch.device) -> None:
        self._rope, self._dtype, self._device = rope, dtype, device
        self._keeps = device.type == "cpu" and rope.by_length is None
        self._kept = self._find(torch.arange(0, device=device), None)

    def __call__(self, positions: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """cos and sin [T, rotary_dim] in the compute dtype; angles in float32. See `Rope.angles`."""
        found = self.placed(positions, lengths)
        if found.places is None:
            return found.cos, found.sin
        return found.cos.index_select(0, found.places), found.sin.index_select(0, found.places)

    def placed(self, positions: Tensor, lengths: Tensor | None) -> PlacedRotary:
        """The same, as indices into the cached tables."""
        end = int(positions.numpy().max(initial=-1)) + 1 if self._keeps else 0
        if not 0 < end <= MOST_KEPT:
            return PlacedRotary(*self._find(positions, lengths), None)
        known = len(self._kept[0])
        if end > known:
            more = self._find(torch.arange(known, min(max(2 * known, end, LEAST_KEPT), MOST_KEPT)), None)
            cos, sin = (torch.cat(parts) for parts in zip(self._kept, more, strict=True))
            self._kept = cos, sin
        return PlacedRotary(*self._kept, positions)

    def _find(self, positions: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        angles, factor = self._rope.angles(positions, lengths), self._rope.factor
        return (angles.cos() * factor).to(self._dtype), (angles.sin() * factor).to(self._dtype)


def make_rope(config: ModelConfig, device: torch.device, local: bool = False) -> Rope:
    """local: for layers with a window, if these have a separate base. Raises ConfigError."""
    if local:
        assert config.rope_local_theta is not None
        return Rope(_plain(config, config.rope_local_theta).to(device))
    scaling = dict(config.rope_scaling or {})
    kind = scaling.get("rope_type", "default")
    try:
        return ROPE_TYPES[kind](config, scaling, device)
    except KeyError as error:
        raise ConfigError(f"config.json: rope scaling {kind!r} lacks {error}") from error


def _plain(config: ModelConfig, theta: float | None = None) -> Tensor:
    return 1.0 / (theta or config.rope_theta) ** _exponents(config)


def _exponents(config: ModelConfig) -> Tensor:
    return torch.arange(0, config.rotary_dim, 2, dtype=torch.int64).float() / config.rotary_dim


def _dynamic(config: ModelConfig, scaling: dict, device: torch.device) -> Rope:
    """The base grows with each token beyond the original length."""
    dim, factor, limit = config.rotary_dim, scaling["factor"], config.max_position_embeddings
    exponents = _exponents(config).to(device)

    def by_length(lengths: Tensor) -> Tensor:
        grown = factor * lengths.clamp(min=limit) / limit - (factor - 1)
        base = config.rope_theta * grown ** (dim / (dim - 2))
        return 1.0 / base.unsqueeze(1) ** exponents

    return Rope(_plain(config).to(device), by_length=by_length)


def _llama3(config: ModelConfig, scaling: dict, device: torch.device) -> Rope:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    plain, factor = _plain(config), scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    context = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / plain
    smooth = (context / wavelength - low) / (high - low)
    blended = (1 - smooth) * plain / factor + smooth * plain
    stretched = torch.where(wavelength > context / low, plain / factor, blended)
    return Rope(torch.where(wavelength < context / high, plain, stretched).to(device))


def _yarn(config: ModelConfig, scaling: dict, device: torch.device) -> Rope:
    dim, base = config.rotary_dim, config.rope_theta
    context = scaling["original_max_position_embeddings"]
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
    frequencies = plain / factor * (1 - keep) + plain * keep

    def magnitude(m: float) -> float:
        return 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention = scaling.get("attention_factor")
    if attention is None:
        attention = magnitude(1.0)
        if scaling.get("mscale") and scaling.get("mscale_all_dim"):
            attention = magnitude(scaling["mscale"]) / magnitude(scaling["mscale_all_dim"])
    return Rope(frequencies.to(device), float(attention))


def _longrope(config: ModelConfig, scaling: dict, device: torch.device) -> Rope:
    """One factor per frequency. The long factors apply to lengths beyond the original context."""
    context = scaling["original_max_position_embeddings"]
    periods = config.rope_theta ** _exponents(config)

    def frequencies(name: str) -> Tensor:
        factors = scaling[name]
        if len(factors) != len(periods):
            raise ConfigError(
                f"config.json: longrope needs {len(periods)} factors, one for each frequency, "
                f"got {len(factors)}"
            )
        # Rounded once after the product, as the models were trained.
        return (1.0 / (torch.tensor(factors, dtype=torch.float32) * periods)).to(device)

    short, long = frequencies("short_factor"), frequencies("long_factor")
    stretch = scaling.get("factor") or config.max_position_embeddings / context
    attention = scaling.get("attention_factor")
    if attention is None:
        attention = math.sqrt(1 + math.log(stretch) / math.log(context)) if stretch > 1 else 1.0
    return Rope(
        short, float(attention), lambda lengths: torch.where((lengths > context).unsqueeze(1), long, short)
    )


def _proportional(config: ModelConfig, scaling: dict, device: torch.device) -> Rope:
    """Pairs beyond the share of the head are not rotated. Pairs are placed as for a whole head."""
    turned = int(scaling["share"] * config.rotary_dim // 2)
    frequencies = _plain(config) / scaling.get("factor", 1.0)
    frequencies[turned:] = 0
    return Rope(frequencies.to(device))


ROPE_TYPES: dict[str, Callable[[ModelConfig, dict, torch.device], Rope]] = {
    "default": lambda config, _, device: Rope(_plain(config).to(device)),
    "linear": lambda config, scaling, device: Rope((_plain(config) / scaling["factor"]).to(device)),
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}
