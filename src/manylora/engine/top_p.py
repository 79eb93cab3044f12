"""The cut of top-p without putting a vocabulary in order: a search for its lowest logit, some bits a time."""

from __future__ import annotations

import torch
from torch import Tensor

UNITS = 2.0**40  # of probability: sums of whole numbers are the same in every order of adding
NEARLY = 1 - 2.0**-20  # of top_p: probabilities are rounded to float32
ROUNDS = ((21, 11), (10, 11), (0, 10))  # of the search: where its bits begin, how many they are


def cut_by_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """The logits [R, vocab] float32, -inf but for the fewest most probable tokens that together reach top_p,
    [R, 1] float64; all of them for 1. Of equal logits the first ones are kept. A row depends on no other."""
    weights = (torch.softmax(logits, dim=-1).double() * UNITS).long()
    needed = (weights.sum(dim=-1, keepdim=True) * (top_p * NEARLY)).ceil().long()
    keys = _ordered(logits)
    above = torch.zeros_like(needed)  # weight of the tokens above the bounds that were found so far
    bound = torch.zeros_like(needed)
    for shift, bits in ROUNDS:
        size = 1 << bits
        inside = (keys >> (shift + bits)) == bound
        buckets = size - 1 - ((keys >> shift) & (size - 1))  # the largest logits first
        found = weights.new_zeros(len(logits), size).scatter_add_(1, buckets, torch.where(inside, weights, 0))
        reached = found.cumsum_(dim=-1).add_(above)
        first = (reached < needed).sum(dim=-1, keepdim=True).clamp_(max=size - 1)
        before = reached.gather(1, (first - 1).clamp(min=0))
        above = torch.where(first > 0, before, above)
        bound = (bound << bits) + (size - 1 - first)
    equal = keys == bound
    rank = equal.cumsum(dim=-1) - 1
    kept = (keys > bound) | (equal & (above + rank * weights < needed))
    return logits.masked_fill(~(kept | (top_p >= 1)), -torch.inf)


def _ordered(values: Tensor) -> Tensor:
    """Whole numbers [...] int64 from 0 to 2**32 - 1 in the order of these float32 values."""
    bits = (values + 0.0).view(torch.int32)  # of -0.0 those of 0.0
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() + 2**31
