"""Quantises weights, and joins quantised parts of a checkpoint to one weight."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from manylora.checkpoints.quant.config import INTEGER, SERVED, CheckpointQuant, QuantAlgo, QuantConfig
from manylora.checkpoints.quant.layouts import halves_to_bytes
from manylora.config.model import ModelConfig
from manylora.errors import ConfigError
from manylora.kernels.quantised import BLOCK, QuantisedWeight, StackedWeight
from manylora.kernels.spec import FP8, FP8_MAX
from manylora.model.plan import checkpoint_plan

# Not the gates of recurrent layers: they are small, and their output is an exponent.
LINEARS = (
    "qkv.weight", ".q.weight", "q_b.weight", "out.weight", "up_gate.weight", "down.weight", "cross_q.weight",
    "cross_kv.weight", ".in.weight", "project_in.weight",
)  # fmt: skip
SMALLEST_GROUP = 32
NO_GROUP = "{} needs matrices with a multiple of {} inputs, one has {}; name it in exclude_modules or use {}"


def is_linear(name: str) -> bool:
    """Whether one of our fused weights, such as `0.qkv.weight`, can be quantised."""
    return name.endswith(LINEARS)


def should_quantise(name: str, sources: Sequence[str], config: QuantConfig) -> bool:
    """Whether one of our fused weights should be quantised: only if all of its sources should."""
    return is_linear(name) and all(config.quantises(s.removesuffix(".weight")) for s in sources)


def quantise(weight: Tensor, config: QuantConfig) -> QuantisedWeight:
    """Quantise a weight [N, K], rounding to nearest. Scales and offsets are rounded to the weight's dtype
    first, then values with these. Raises ConfigError if no group size fits.
    """
    wide, dtype = weight.float(), weight.dtype
    largest = wide.abs().amax(1, keepdim=True)
    if config.quant_algo == QuantAlgo.FP8:
        scales = _nonzero((largest / FP8_MAX).to(dtype))
        values = (wide / scales.float()).clamp_(-FP8_MAX, FP8_MAX).to(FP8)
        return QuantisedWeight(values, scales)
    if config.quant_algo in (QuantAlgo.W8A16, QuantAlgo.W8A8):
        scales = _nonzero((largest / 127).to(dtype))
        values = (wide / scales.float()).round_().clamp_(-127, 127).to(torch.int8)
        return QuantisedWeight(values, scales, rounds_inputs=config.quant_algo == QuantAlgo.W8A8)
    if config.quant_algo == QuantAlgo.W4A8:
        return _symmetric(wide, dtype)
    rows, columns = weight.shape
    size = config.group_size
    while columns % size:
        size //= 2
    if size < SMALLEST_GROUP:
        raise ConfigError(NO_GROUP.format(QuantAlgo.W4A16, SMALLEST_GROUP, columns, QuantAlgo.W8A16))
    groups = wide.view(rows, columns // size, -1)
    low, high = groups.amin(-1), groups.amax(-1)
    scales = _nonzero(((high - low) / 15).to(dtype))
    offsets = (low + 8 * scales.float()).to(dtype)
    steps = (groups - offsets.float().unsqueeze(-1)) / scales.float().unsqueeze(-1)
    halves = (steps.round_() + 8).clamp_(0, 15).to(torch.uint8).view(rows, columns)
    return QuantisedWeight(halves_to_bytes(halves), scales, offsets)


def _symmetric(wide: Tensor, dtype: torch.dtype) -> QuantisedWeight:
    """4 bits without offsets: in each BLOCK inputs, the one with the largest magnitude becomes -8. Scales are
    rounded to bfloat16, in which the kernels store them, whatever their dtype.
    """
    rows, columns = wide.shape
    if columns % BLOCK:
        raise ConfigError(NO_GROUP.format(QuantAlgo.W4A8, SMALLEST_GROUP, columns, QuantAlgo.W8A8))
    groups = wide.view(rows, columns // BLOCK, BLOCK)
    farthest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1)
    scales = (farthest / -8).bfloat16().to(dtype)
    scales = torch.where(scales == 0, 1, scales)
    steps = groups / scales.float().unsqueeze(-1)
    halves = (steps.round_() + 8).clamp_(0, 15).to(torch.uint8).view(rows, columns)
    return QuantisedWeight(halves_to_bytes(halves), scales, rounds_inputs=True)


def stack_weights(pieces: Sequence[Tensor | QuantisedWeight]) -> Tensor | QuantisedWeight | StackedWeight:
    """Concatenate weights with the same inputs, as a StackedWeight if their formats differ."""
    runs: list[list[Any]] = []
    for piece in pieces:
        if runs and _same_format(runs[-1][0], piece):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    parts: list[Tensor | QuantisedWeight] = []
    for first, *others in runs:
        if others and isinstance(first, Tensor):
            first = torch.cat([first, *others])
        elif others:
            names = first.tensors().keys() - {"order", "codebook"}
            joined = {name: torch.cat([getattr(one, name) for one in (first, *others)]) for name in names}
            first = replace(first, **joined)
        parts.append(first)
    return (
        parts[0] if len(parts) == 1 else StackedWeight(tuple(parts), tuple(part.shape[0] for part in parts))
    )


def check_quant_request(
    config: QuantConfig | None,
    stored: CheckpointQuant | None,
    is_quantised: bool,
    is_gguf: bool,
    is_served: bool,
) -> None:
    """Raises ConfigError if a checkpoint cannot be quantised as requested. stored: its own quantisation.
    is_served: it is not converted; of a GGUF file W8A8 and W4A8 then only round the inputs.
    """
    if config is None or config.quant_algo in (None, QuantAlgo.NO_QUANT):
        return
    if is_quantised and is_gguf:
        if not is_served or config.quant_algo not in INTEGER:
            raise ConfigError(
                "a GGUF file is quantised already: leave quant_algo out; a CPU also serves such a file with "
                "W8A8 or W4A8, which keep its weights and round activations to 8 bits"
            )
    elif is_quantised:
        algo = None if stored is None else stored.algo
        if config.quant_algo != algo or config.exclude_modules:
            already = "already" if algo is None else f"already, in {algo}"
            raise ConfigError(f"the model directory is quantised {already}: leave quant_algo out")
    elif not config.any_weights:
        raise ConfigError(
            f"quant_algo {config.quant_algo} needs a checkpoint that was calibrated so, and this one holds "
            f"plain weights; use {' or '.join(SERVED)}"
        )


def _same_format(one: Tensor | QuantisedWeight, other: Tensor | QuantisedWeight) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor)
    same = one.values.dtype == other.values.dtype and one.scales.shape[1] == other.scales.shape[1]
    same = same and one.rounds_inputs == other.rounds_inputs
    if not same or one.tensors().keys() != other.tensors().keys():
        return False
    if one.codebook is not None and other.codebook is not None:
        return torch.equal(one.codebook, other.codebook)
    return one.order is None or other.order is None or torch.equal(one.order, other.order)


def _nonzero(scales: Tensor) -> Tensor:
    """1 in place of the scale 0 of a row of zeros."""
    return torch.where(scales > 0, scales, torch.ones_like(scales))


class EffectiveWeights:
    """A checkpoint's weights as the served model uses them in products; DoRA's norms must be those of these,
    which loading may round. quant: of plain linear layers at load time. dtype: to which scales are rounded;
    float32 if unknown. Thread-safe.
    """

    def __init__(
        self, config: ModelConfig, quant: QuantConfig | None, dtype: torch.dtype = torch.float32
    ) -> None:
        self._config, self._dtype, self._quant = config, dtype, quant
        self._quantised: frozenset[str] | None = None  # set once the checkpoint's names are known

    def __call__(
        self, name: str, names: Collection[str], weight: Tensor | QuantisedWeight
    ) -> Tensor | QuantisedWeight:
        """weight: some rows of the tensor `name`. names: all tensors in the checkpoint."""
        if isinstance(weight, QuantisedWeight):
            return weight.to(self._dtype)
        if self._quant is None or not self._quant.any_weights:
            return weight
        if self._quantised is None:
            found: set[str] = set()
            for ours, spec in checkpoint_plan(self._config, names).items():
                sources = [piece.source for piece in spec.slices]
                if should_quantise(ours, sources, self._quant):  # layers that are fused: all, or none
                    found.update(sources)
            self._quantised = frozenset(found)
        return quantise(weight.to(self._dtype), self._quant) if name in self._quantised else weight
