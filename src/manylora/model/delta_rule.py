"""DeltaRule: a recurrent layer used instead of attention. Its state per sequence has a fixed size."""

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
    """The states of one layer, and the slots that a step reads and writes."""

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
    """States of all layers. Their initial content is never read."""
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
