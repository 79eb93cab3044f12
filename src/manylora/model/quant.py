"""Weights into fewer bits, and back from a checkpoint that `manylora build` wrote."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from manylora.errors import ConfigError
from manylora.kernels.quantised import QuantisedWeight
from manylora.quant import QuantAlgo, QuantConfig

__all__ = ["PARTS", "chosen", "is_linear", "quantise", "read_quantised", "stored_names", "stored_parts"]

LINEARS = ("qkv.weight", "out.weight", "up_gate.weight", "down.weight", "cross_q.weight", "cross_kv.weight")
PARTS = ("qweight", "scales", "offsets")
"""What stands in a built checkpoint in the place of `weight`; without offsets with 8 bits."""
SMALLEST_GROUP = 32
FP8_MAX = 448.0


def is_linear(name: str) -> bool:
    """name: of one of our fused weights, as `0.qkv.weight`. Whether it can be quantised."""
    return name.endswith(LINEARS)


def chosen(name: str, sources: Sequence[str], config: QuantConfig) -> bool:
    """Whether one of our fused weights is to be quantised: all of its sources are."""
    return is_linear(name) and all(config.quantises(s.removesuffix(".weight")) for s in sources)


def quantise(weight: Tensor, config: QuantConfig) -> QuantisedWeight:
    """Round a weight [N, K] to the nearest. Scales and offsets get the weight's dtype, and values are rounded
    with them as they are then. Raises ConfigError when no group size fits."""
    wide, dtype = weight.float(), weight.dtype
    largest = wide.abs().amax(1, keepdim=True)
    if config.quant_algo == QuantAlgo.FP8:
        scales = _nonzero((largest / FP8_MAX).to(dtype))
        values = (wide / scales.float()).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        return QuantisedWeight(values, scales)
    if config.quant_algo == QuantAlgo.W8A16:
        scales = _nonzero((largest / 127).to(dtype))
        values = (wide / scales.float()).round_().clamp_(-127, 127).to(torch.int8)
        return QuantisedWeight(values, scales)
    rows, columns = weight.shape
    groups = wide.view(rows, columns // _group_size(columns, config.group_size), -1)
    low, high = groups.amin(-1), groups.amax(-1)
    scales = _nonzero(((high - low) / 15).to(dtype))
    offsets = (low + 8 * scales.float()).to(dtype)
    steps = (groups - offsets.float().unsqueeze(-1)) / scales.float().unsqueeze(-1)
    halves = (steps.round_() + 8).clamp_(0, 15).to(torch.uint8).view(rows, columns)
    return QuantisedWeight(halves[:, ::2] | (halves[:, 1::2] << 4), scales, offsets)


def stored_parts(source: str, names: Mapping[str, Any]) -> dict[str, str]:
    """Part -> name of a quantised weight in a checkpoint; empty when `source` is there as it is, or not."""
    stem = source.removesuffix("weight")
    if stem + PARTS[0] not in names:
        return {}
    return {part: stem + part for part in PARTS if part != "offsets" or stem + part in names}


def stored_names(source: str, names: Mapping[str, Any]) -> set[str]:
    """The tensors of a checkpoint that make up the weight `source`."""
    return set(stored_parts(source, names).values()) or {source}


def read_quantised(
    pieces: Sequence[tuple[str, int, int]],
    columns: int,
    names: Mapping[str, Any],
    read: Callable[[str, slice], Tensor],
    dtype: torch.dtype,
) -> QuantisedWeight:
    """Rows of stored weights, stacked; pieces: source, first row, number of rows. Raises ConfigError naming a
    tensor that does not fit."""
    found: list[dict[str, Tensor]] = []
    sources = [source for source, _, _ in pieces]
    for source, start, count in pieces:
        stored = stored_parts(source, names)
        parts = {part: read(name, slice(start, start + count)) for part, name in stored.items()}
        if "scales" not in parts:
            raise ConfigError(f"{source} is not quantised, and layers it is fused with are; build it again")
        four = parts["qweight"].dtype == torch.uint8
        wanted = (count, columns // 2 if four else columns)
        if tuple(parts["qweight"].shape) != wanted or len(parts["scales"]) != count:
            raise ConfigError(
                f"{stored_parts(source, names)['qweight']} must be {wanted} by config.json, got "
                f"{tuple(parts['qweight'].shape)}"
            )
        found.append(parts)
    if len({tuple(sorted(parts)) for parts in found}) > 1:
        raise ConfigError(f"{sources[0]} and {sources[-1]} are quantised differently; build it again")
    made = {part: torch.cat([parts[part] for parts in found]) for part in found[0]}
    offsets = made.get("offsets")
    return QuantisedWeight(
        made["qweight"], made["scales"].to(dtype), None if offsets is None else offsets.to(dtype)
    )


def _group_size(columns: int, wanted: int) -> int:
    size = wanted
    while size >= SMALLEST_GROUP:
        if columns % size == 0:
            return size
        size //= 2
    raise ConfigError(
        f"W4A16 needs matrices with a multiple of {SMALLEST_GROUP} inputs, one has {columns}; "
        "name it in exclude_modules or use W8A16"
    )


def _nonzero(scales: Tensor) -> Tensor:
    """A row of zeros has no scale; any does."""
    return torch.where(scales > 0, scales, torch.ones_like(scales))
