"""RelativeBias: T5's bias of attention scores, by relative position."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class RelativeBias:
    """A learned bias for each head and bucket of distances.

    weight: [buckets, heads]. max_distance: larger distances share the last bucket. longest: tokens of the
    longest sequence. both_ways: half of the buckets are for later keys, as in an encoder.
    """

    def __init__(self, weight: Tensor, max_distance: int, longest: int, both_ways: bool) -> None:
        self._zero = longest - 1
        distances = torch.arange(-self._zero, longest)
        buckets = _buckets(distances, weight.shape[0], max_distance, both_ways)
        self._by_distance = weight[buckets.to(weight.device)].T.contiguous()  # [heads, 2 * longest - 1]

    def __call__(self, distances: Tensor) -> Tensor:
        """distances: int64, of keys minus queries, each less than `longest`; [...] -> [heads, ...]."""
        return self._by_distance[:, distances + self._zero]


def _buckets(distances: Tensor, count: int, max_distance: int, both_ways: bool) -> Tensor:
    """Half of the buckets have one distance each, the others grow logarithmically.

    In float32 and in the training code's order of operations, as rounding decides between two buckets.
    """
    later = torch.zeros_like(distances)
    if both_ways:
        count //= 2
        later, far = (distances > 0) * count, distances.abs()
    else:
        far = (-distances).clamp_(min=0)
    exact = count // 2
    steps = torch.log(far.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (count - exact)
    wide = (exact + steps.to(torch.long)).clamp_(max=count - 1)
    return later + torch.where(far < exact, far, wide)
