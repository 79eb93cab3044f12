"""MoePart: the mixture of experts on a rank that has some of the experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from manylora.kernels.experts import HostPairs
from manylora.kernels.spec import LoraBatch
from manylora.model.moe import Moe, in_pairs


@dataclass(frozen=True)
class MoePart(Moe):
    """As `Moe`, with experts [first, first + config.num_experts) of those among which the router chooses. The
    other experts contribute 0, so that the ranks' results can be summed.
    """

    first: int = 0

    def each(
        self, x: Tensor, choices: Tensor, lora: LoraBatch | None, weights: Tensor | None = None
    ) -> Tensor:
        count, ops = self.config.num_experts, self.up_gate.ops
        own = choices - self.first
        mine = (own >= 0) & (own < count)
        # Choices of other ranks' experts are mapped to one additional expert after ours.
        pairs, places = ops.pair_up(own.where(mine, count), count + 1, lora)
        if not isinstance(pairs, HostPairs):
            # A device that does not report the number of pairs to the host computes all of them.
            y = super().each(x, own.where(mine, choices % count), lora, weights)
            return y.where(mine.unsqueeze(-1), 0)
        used = pairs.starts[count]
        y = torch.zeros((len(places), x.shape[1]), dtype=x.dtype, device=x.device)
        if used:
            groups = pairs.groups[pairs.groups[:, 2] < count]
            ours = type(pairs)(pairs.rows[:used], pairs.starts[: count + 1], groups)
            sizes, experts = in_pairs(weights, places), in_pairs(own, places) if self.config.biased else None
            first = (None if part is None else part[:used] for part in (experts, sizes))
            y[:used] = self.run(x, ours, next(first), lora, next(first))
        return y[places].view(*choices.shape, -1)
