"""SharedMamba2: a Mamba-2 layer on one rank, if heads that are normalised together are on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch.nn.functional as F
from torch import Tensor

from manylora.model.delta_rule import LayerState
from manylora.model.mamba2 import Mamba2


@dataclass(frozen=True)
class SharedMamba2(Mamba2):
    """add_up: sums over the ranks of a stage, [T, groups]. group, groups: the group of this rank's heads, and
    the number of groups. total: values per group, over all its ranks.
    """

    add_up: Callable[[Tensor], Tensor] = lambda x: x
    group: int = 0
    groups: int = 1
    total: int = 0

    def _mixed(self, rows: Tensor, cache: LayerState) -> Tensor:
        own = self.weights
        assert own.norm is not None
        plain = self.ops.mamba2(rows, replace(own, norm_groups=0), cache.state, cache.batch).float()
        gate = F.silu(rows[:, : own.value_size].float())
        y = plain * gate if own.gate_first else plain
        squares = y.new_zeros(len(y), self.groups)
        squares[:, self.group] = y.square().sum(-1)
        mean = self.add_up(squares)[:, self.group, None] / self.total
        y = y * (mean + own.eps).rsqrt() * own.norm
        return (y if own.gate_first else y * gate).to(rows.dtype)
