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
    keys = _descending(logits)
    bound = torch.zeros_like(needed)  # the leading bits of the last key that is kept
    for shift, bits in ROUNDS:
        size = 1 << bits
        # The first bucket has all keys before those with the bits found so far, the last one all after them.
        buckets = ((keys >> shift) - (bound * size - 1)).clamp_(0, size + 1)
        reached = weights.new_zeros(len(logits), size + 2).scatter_add_(1, buckets, weights).cumsum_(dim=-1)
        last = (reached < needed).sum(dim=-1, keepdim=True).clamp_(1, size)  # where a row is not finite too
        bound = bound * size + (last - 1)
    equal = keys == bound
    left = needed - reached.gather(1, last - 1)  # for the keys that are equal
    kept = (keys < bound) | (equal & ((equal.cumsum(dim=-1) - 1) * weights < left))
    return logits.masked_fill(~(kept | (top_p >= 1)), -torch.inf)


def _descending(values: Tensor) -> Tensor:
    """Whole numbers [...] int64 from 0 to 2**32 - 1 that fall as these float32 values rise."""
    bits = (values + 0.0).view(torch.int32)  # of -0.0 those of 0.0
    return (2**31 - 1) - (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
