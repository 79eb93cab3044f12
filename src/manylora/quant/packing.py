"""Unpacks small integers from 32-bit words, and orders inputs by quantisation group."""

from __future__ import annotations

import math

import torch
from torch import Tensor

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position in an AWQ word of each of its eight values."""


def unpack(packed: Tensor, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """int32 [R, C] -> uint8 [R, C * 32 / bits]; the first value lies in a word's lowest bits.

    places: the positions of the values in a word, if others.
    """
    count = 32 // bits
    shifts = torch.tensor(places or range(count), dtype=torch.int32, device=packed.device) * bits
    values = (packed.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return values.to(torch.uint8).flatten(1)


def halves_to_bytes(halves: Tensor) -> Tensor:
    """uint8 [N, K] from 0 to 15 -> [N, K / 2], the even columns in the low half."""
    return halves[:, ::2] | (halves[:, 1::2] << 4)


def regroup(groups: Tensor) -> tuple[Tensor | None, Tensor]:
    """Order the inputs by group, and cut them into runs of equal length that each lie in one group.

    groups: int [K], the group of each input. Returns the order int64 [K] (None: unchanged), and the group of
    each run, int64 [K / length], with the largest possible length.
    """
    groups = groups.long()
    order = None
    if bool((groups.diff() < 0).any()):
        order = torch.argsort(groups, stable=True)
        groups = groups[order]
    lengths = torch.unique_consecutive(groups, return_counts=True)[1].tolist()
    return order, groups[:: math.gcd(*lengths)]
