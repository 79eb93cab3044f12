"""Recurrent layers, whose state per sequence has a fixed size: DeltaRule, Mamba2 and ShortConv."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from manylora.config.blocks import Mamba2Config, RecurrentConfig
from manylora.kernels.recurrent import DeltaWeights, Mamba2Weights, RecurrentState, StateBatch
from manylora.kernels.reference import ReferenceOps
from manylora.kernels.spec import LoraBatch
from manylora.model.layers import LoraLinear


@dataclass(frozen=True)
class LayerState:
    state: RecurrentState
    batch: StateBatch


@dataclass(frozen=True)
class DeltaRule:
    """project: to [q; k; v; z] of all heads. gates: to [b; a], which control writing and forgetting."""

    ops: ReferenceOps
    project: LoraLinear
    gates: LoraLinear
    out: LoraLinear
    weights: DeltaWeights

    def __call__(self, x: Tensor, cache: LayerState, lora: LoraBatch | None) -> Tensor:
        projected, gates = self.project(x, lora), self.gates(x, lora)
        mixed = self.ops.delta_rule(projected, gates, self.weights, cache.state, cache.batch)
        return self.out(mixed, lora)


def make_states(config: RecurrentConfig, slots: int, device: torch.device) -> RecurrentState:
    return RecurrentState(
        *(torch.zeros(len(config.layers), slots, *shape, device=device) for shape in config.state_shapes)
    )


def passing_states(
    config: RecurrentConfig, starts: Sequence[int], device: torch.device
) -> tuple[RecurrentState, StateBatch]:
    """States for sequences that start with this batch and are not continued."""
    count = len(starts) - 1
    none, slots = torch.full((count,), -1, device=device), torch.arange(count, device=device)
    batch = StateBatch(torch.tensor(list(starts), device=device), none, slots, torch.zeros_like(slots), none)
    return make_states(config, count, device), batch


@dataclass(frozen=True)
class Mamba2:
    """project: to [z; values; b; c; d]. factors: on these, in the compute dtype; None: none."""

    ops: ReferenceOps
    project: LoraLinear
    out: LoraLinear
    weights: Mamba2Weights
    factors: Tensor | None = None

    def __call__(self, x: Tensor, cache: LayerState, lora: LoraBatch | None) -> Tensor:
        rows = self.project(x, lora)
        rows = rows if self.factors is None else rows * self.factors
        return self.out(self._mixed(rows, cache), lora)

    def _mixed(self, rows: Tensor, cache: LayerState) -> Tensor:
        return self.ops.mamba2(rows, self.weights, cache.state, cache.batch)


def mamba2_factors(own: Mamba2Config, device: torch.device, dtype: torch.dtype) -> Tensor | None:
    if set(own.scales) <= {1.0}:
        return None
    keys = own.groups * own.state_dim
    sizes = torch.tensor((own.value_size, own.value_size, keys, keys, own.heads))
    return torch.tensor(own.scales).repeat_interleave(sizes).to(device, dtype)


def mamba2_weights(own: Mamba2Config, weights: Mapping[str, Tensor], eps: float) -> Mamba2Weights:
    """weights: of the layer, by our names."""
    taps = weights["taps"].T.contiguous()
    bias = weights["taps_bias"] if own.conv_bias else torch.zeros_like(taps[0])
    return Mamba2Weights(
        taps=taps,
        bias=bias,
        decay=-weights["decay"].exp(),
        shift=weights["shift"],
        skip=weights["skip"],
        norm=weights["inner_norm.weight"] if own.normed else None,
        eps=eps,
        groups=own.groups,
        head_dim=own.head_dim,
        state_dim=own.state_dim,
        norm_groups=own.groups,
        gate_first=own.gate_first,
        least=own.steps[0],
        most=own.steps[1],
    )


@dataclass(frozen=True)
class ShortConv:
    """project: to [b; c; h]. The convolution is of b * h, times c. taps: [taps, channels], newest last."""

    ops: ReferenceOps
    project: LoraLinear
    out: LoraLinear
    taps: Tensor

    def __call__(self, x: Tensor, cache: LayerState, lora: LoraBatch | None) -> Tensor:
        mixed = self.ops.short_conv(self.project(x, lora), self.taps, cache.state, cache.batch)
        return self.out(mixed, lora)
