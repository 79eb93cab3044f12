"""Panels for integer products: weights in 8 or 4 bits, with inputs rounded to 8 bits for the product."""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from manylora.kernels.huge_pages import huge_zeros
from manylora.kernels.panels import INTEGERS, Panels
from manylora.kernels.quantised import BLOCK, QuantisedWeight


def to_integer_panels(library: ctypes.CDLL, weight: QuantisedWeight) -> Panels | None:
    """None if native/integer.c has no kernel for this weight. Uses the processor's byte products if
    available, with identical results.

    values: int8 [panels, K / 4, width, 4], inputs padded with zeros to blocks of 32; for 4 bits uint8
            [panels, K / 8, width, 4], inputs 0 to 3 of eight in the low halves, 4 to 7 in the high halves.
    scales: float32 [panels, 1, width]; for 4 bits bfloat16 [panels, K / 32, width].
    """
    width, form = library.integer_width(), INTEGERS + library.integer_dots()
    (rows, columns), groups = weight.shape, weight.scales.shape[1]
    panels, others = -(-rows // width), (weight.offsets, weight.zeros, weight.order)
    below = panels * width - rows
    if columns < BLOCK or any(part is not None for part in others):
        return None
    if weight.values.dtype == torch.int8 and groups == 1:
        values = F.pad(weight.values, (0, -columns % BLOCK, 0, below))
        fours = _in_huge_pages(values.view(panels, width, -1, 4).transpose(1, 2))
        scales = F.pad(weight.scales.float().flatten(), (0, below)).view(panels, 1, width)
        return Panels(fours, scales, None, rows, columns, form)
    narrow = weight.scales.bfloat16()
    if weight.values.dtype != torch.uint8 or weight.group_size != BLOCK or (narrow != weight.scales).any():
        return None
    halves = F.pad(weight.halves(), (0, 0, 0, below)).view(panels, width, -1, 2, 4)
    eights = _in_huge_pages((halves[:, :, :, 0] | (halves[:, :, :, 1] << 4)).transpose(1, 2))
    turned = F.pad(narrow, (0, 0, 0, below)).view(panels, width, groups).transpose(1, 2).contiguous()
    return Panels(eights, turned, None, rows, columns, form)


def _in_huge_pages(values: Tensor) -> Tensor:
    return huge_zeros(tuple(values.shape), values.dtype).copy_(values)
