"""DeltaRule: a recurrent layer, in attention's place. Its state of a sequence has one size at any length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from manylora.config.blocks import RecurrentConfig
from manylora.kernels.delta_rule import DeltaWeights
from manylora.kernels.recurrent import RecurrentState, StateBatch
from manylora.kernels.reference import ReferenceOps
from manylora.kernels.spec import LoraBatch
from manylora.model.layers import LoraLinear


@dataclass(frozen=True)
class LayerState:
    """The states of one layer, and which of them a step reads and writes."""

    state: RecurrentState
    batch: StateBatch


@dataclass(frozen=True)
class DeltaRule:
    """project: to [q; k; v; z] of all heads. gates: to [b; a], how much a row writes and what it keeps."""

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
    """Of all layers. What is in them is never read before it is written."""
    return RecurrentState(
        *(torch.zeros(len(config.layers), slots, *shape, device=device) for shape in config.state_shapes)
    )


def passing_states(
    config: RecurrentConfig, starts: Sequence[int], device: torch.device
) -> tuple[RecurrentState, StateBatch]:
    """Of sequences that begin with this batch, and of which nothing is kept after it."""
    count = len(starts) - 1
    none, slots = torch.full((count,), -1, device=device), torch.arange(count, device=device)
    batch = StateBatch(torch.tensor(list(starts), device=device), none, slots, torch.zeros_like(slots), none)
    return make_states(config, count, device), batch
