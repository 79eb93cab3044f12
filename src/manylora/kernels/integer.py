"""Linear layers by products of integers: weights in 8 or 4 bits, inputs rounded to 8 bits for the product."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from manylora.kernels.panels import address
from manylora.kernels.quantised import BLOCK, QuantisedWeight


@dataclass(frozen=True, eq=False)
class IntegerPanels:
    """A weight [N, K] laid out for native/integer.c; inputs are padded with zeros to blocks of 32.

    values: int8 [panels, K / 4, width, 4]; of 4 bits uint8 [panels, K / 8, width, 4], inputs 0 to 3 of eight
            in the low halves, 4 to 7 in the high ones.
    scales: float32 [panels, width]; of 4 bits bfloat16 [panels, K / 32, width].
    rows: N. columns: K.
    """

    values: Tensor
    scales: Tensor
    rows: int
    columns: int

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes


def to_integer_panels(weight: QuantisedWeight, width: int) -> IntegerPanels | None:
    """None where the compiled layer has no kernel for it."""
    (rows, columns), groups = weight.shape, weight.scales.shape[1]
    panels, others = -(-rows // width), (weight.offsets, weight.zeros, weight.order)
    below = panels * width - rows
    if any(part is not None for part in others):
        return None
    if weight.values.dtype == torch.int8 and groups == 1:
        values = F.pad(weight.values, (0, -columns % BLOCK, 0, below))
        fours = values.view(panels, width, -1, 4).transpose(1, 2).contiguous()
        scales = F.pad(weight.scales.float().flatten(), (0, below)).view(panels, width)
        return IntegerPanels(fours, scales, rows, columns)
    narrow = weight.scales.bfloat16()
    if weight.values.dtype != torch.uint8 or weight.group_size != BLOCK or (narrow != weight.scales).any():
        return None
    halves = F.pad(weight.halves(), (0, 0, 0, below)).view(panels, width, -1, 2, 4)
    eights = (halves[:, :, :, 0] | (halves[:, :, :, 1] << 4)).transpose(1, 2).contiguous()
    turned = F.pad(narrow, (0, 0, 0, below)).view(panels, width, groups).transpose(1, 2).contiguous()
    return IntegerPanels(eights, turned, rows, columns)


def integer_linear(
    library: ctypes.CDLL, x: Tensor, weight: IntegerPanels, bias: Tensor | None, dots: int
) -> Tensor:
    """x [T, K] float32 -> [T, N] float32. dots: whether to use the processor's instruction for products of
    bytes; the bits are the same."""
    if x.stride(1) != 1:
        x = x.contiguous()
    count = x.shape[0]
    y = torch.empty(count, weight.rows)
    room = torch.empty(library.integer_room(count, weight.columns), dtype=torch.uint8)
    multiply = library.linear_w8a8 if weight.values.dtype == torch.int8 else library.linear_w4a8
    multiply(
        y.data_ptr(), weight.rows, x.data_ptr(), x.stride(0), count, weight.values.data_ptr(),
        weight.columns, weight.rows, weight.scales.data_ptr(), room.data_ptr(), dots,
        address(bias),
    )  # fmt: skip
    return y
