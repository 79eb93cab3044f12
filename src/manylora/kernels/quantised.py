"""Weights in 8 or 4 bits, and linear layers with them.

PyTorch's kernels are used where they are exact enough. Otherwise weights are dequantised, some rows at a
time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from manylora.errors import ConfigError

WIDE_ELEMENTS = 2**22  # elements of a weight dequantised at a time
INT8_ROWS = 64  # token rows up to which the 8-bit CPU kernel is faster
INT4_ROWS = 16  # token rows for which the 4-bit CPU kernel is fastest
INT4_GROUPS = (32, 64, 128, 256)  # group sizes of the 4-bit kernels
BLOCK = 32  # inputs that share a scale when rounded to 8 bits
FLOAT4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of the 4-bit float e2m1, by code. They are whole numbers."""
SMALLEST_INPUT = 1e-30  # of a block; smaller inputs count as 0


@dataclass(frozen=True)
class QuantisedWeight:
    """A weight [N, K] with N outputs and K inputs, which may be stored in another order:

    weight[n, order[k]] = scales[n, g] * (value[n, k] - zeros[n, g]) + offsets[n, g], g = k // group_size.

    values:  8 bits: int8 or float8_e4m3fn [N, K]. 4 bits: uint8 [N, K / 2], input 2i in the low half of
             byte i; a value is its half byte minus 8, or its entry in the codebook.
    scales:  [N, K / group_size], compute dtype. offsets: the same, or None for 0.
    zeros:   int8 [N, K / group_size], or None for 0. order: int64 [K], or None for 0 to K - 1.
    codebook: [16] float32, the values of 4-bit codes, or None.
    rounds_inputs: whether its inputs are rounded as by `round_inputs`.
    """

    values: Tensor
    scales: Tensor
    offsets: Tensor | None = None
    zeros: Tensor | None = None
    order: Tensor | None = None
    codebook: Tensor | None = None
    rounds_inputs: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.values.shape
        return rows, columns * (2 if self.values.dtype == torch.uint8 else 1)

    @property
    def group_size(self) -> int:
        return self.shape[1] // self.scales.shape[1]

    @property
    def is_plain(self) -> bool:
        """Whether it has no zeros, no other order of inputs and no codebook."""
        return self.zeros is None and self.order is None and self.codebook is None

    @property
    def is_float4(self) -> bool:
        """Whether its 4 bits are e2m1 codes with halved scales."""
        return self.codebook is not None and self.codebook.tolist() == list(FLOAT4)

    def without_codes(self) -> QuantisedWeight | Tensor:
        """The same without codebook: in 8 bits if its values are whole numbers, otherwise dequantised."""
        if not self.is_float4 or self.codebook is None:
            return self if self.codebook is None else self.wide()
        values = self.codebook.to(torch.int8)[self.halves().int()]
        return replace(self, values=values, codebook=None)

    def tensors(self) -> dict[str, Tensor]:
        """The fields that are not None."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: part for name, part in parts.items() if isinstance(part, Tensor)}

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.tensors().values())

    def halves(self) -> Tensor:
        """For 4 bits only: the unpacked half bytes, uint8 [N, K] from 0 to 15."""
        return torch.stack((self.values & 15, self.values >> 4), dim=-1).flatten(1)

    def rows(self, rows: slice) -> QuantisedWeight:
        """The part of the weight for some of the outputs."""
        whole = ("order", "codebook")
        parts: dict[str, Any] = {
            name: part[rows] for name, part in self.tensors().items() if name not in whole
        }
        return replace(self, **parts)

    def columns(self, columns: range) -> QuantisedWeight:
        """The part of the weight for some of the inputs. Raises ConfigError if its borders are not group
        borders, or if the inputs are stored in another order.
        """
        if len(columns) == self.shape[1]:
            return self
        size, per_byte = self.group_size, self.shape[1] // self.values.shape[1]
        if self.order is not None:
            raise ConfigError(
                "the inputs of a weight that is stored in another order cannot be shared; stages (pp_size) "
                "cut no matrix"
            )
        border = per_byte if self.scales.shape[1] == 1 else size
        border = max(border, BLOCK) if self.rounds_inputs else border
        if columns.start % border or columns.stop % border:
            raise ConfigError(
                f"a weight quantised in groups of {border} inputs cannot be shared by {len(columns)} of its "
                f"{self.shape[1]} inputs: only so many ranks can share it as divide its "
                f"{self.shape[1] // border} groups; stages (pp_size) cut no matrix"
            )
        values = self.values[:, columns.start // per_byte : columns.stop // per_byte].contiguous()
        if self.scales.shape[1] == 1:
            return replace(self, values=values)
        groups = slice(columns.start // size, columns.stop // size)
        tables: dict[str, Any] = {
            name: table[:, groups].contiguous()
            for name, table in self.tensors().items()
            if name in ("scales", "offsets", "zeros")
        }
        return replace(self, values=values, **tables)

    def to(self, dtype: torch.dtype) -> QuantisedWeight:
        """The same weight with scales and offsets in another dtype."""
        offsets = None if self.offsets is None else self.offsets.to(dtype)
        return replace(self, scales=self.scales.to(dtype), offsets=offsets)

    def wide(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows [start, stop) dequantised, in the dtype of the scales."""
        part = self.rows(slice(start, stop))
        scales = part.scales.unsqueeze(-1)
        four = self.values.dtype == torch.uint8
        if self.codebook is not None:
            values = self.codebook.to(scales.dtype)[part.halves().int()]
        else:
            values = (part.halves().to(scales.dtype) - 8) if four else part.values.to(scales.dtype)
        grouped = values.view(len(values), part.scales.shape[1], -1)
        if part.zeros is not None:
            grouped = grouped - part.zeros.unsqueeze(-1)
        grouped = grouped * scales
        if part.offsets is not None:
            grouped += part.offsets.unsqueeze(-1)
        made = grouped.view(len(values), -1)
        return made if self.order is None else torch.empty_like(made).index_copy_(1, self.order, made)


@dataclass(frozen=True)
class StackedWeight:
    """Weights with the same inputs, stacked by outputs, in different formats that cannot be concatenated.

    parts: plain, quantised or packed weights. rows: number of outputs of each.
    """

    parts: tuple[Any, ...]
    rows: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return sum(map(weight_bytes, self.parts))

    def map(self, pack: Callable[[Any], Any]) -> StackedWeight:
        return StackedWeight(tuple(pack(part) for part in self.parts), self.rows)


@dataclass(frozen=True)
class PackedInt4:
    """A 4-bit weight in the layout of PyTorch's kernel on the device, for bfloat16.

    table [groups, N, 2]: scales, offsets. order: as in QuantisedWeight.
    """

    packed: Tensor
    table: Tensor
    group_size: int
    order: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.table.nbytes + (0 if self.order is None else self.order.nbytes)


def weight_bytes(weight: Any) -> int:
    """Bytes of a weight in any layout. oneDNN's tensors have no nbytes."""
    return weight.numel() * weight.element_size() if isinstance(weight, Tensor) else weight.nbytes


def pack_for_cpu(weight: QuantisedWeight) -> QuantisedWeight | PackedInt4:
    """Repack for PyTorch's 4-bit kernel, only for bfloat16 models, because it rounds activations to
    bfloat16.
    """
    kernel_takes = (
        not weight.rounds_inputs
        and weight.codebook is None
        and weight.values.dtype == torch.uint8
        and weight.scales.dtype == torch.bfloat16
        and weight.group_size in INT4_GROUPS
        and weight.shape[0] % 16 == 0
    )
    if not kernel_takes:
        return weight
    offsets = torch.zeros_like(weight.scales) if weight.offsets is None else weight.offsets
    if weight.zeros is not None:
        offsets = (offsets.float() - weight.scales.float() * weight.zeros).to(offsets.dtype)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.halves().int(), 1)
    table = torch.stack((weight.scales.T, offsets.T), dim=-1).contiguous()
    return PackedInt4(packed, table, weight.group_size, weight.order)


def quantised_linear(x: Tensor, weight: QuantisedWeight | PackedInt4, bias: Tensor | None) -> Tensor:
    """Semantics: x @ weight.wide().T + bias; x [T, K] in the compute dtype -> [T, N]."""
    if isinstance(weight, QuantisedWeight) and weight.rounds_inputs:
        wide = None if bias is None else bias.float()
        return _wide(round_inputs(x), weight.to(torch.float32), wide).to(x.dtype)
    if weight.order is not None:
        x, weight = x.index_select(1, weight.order), replace(weight, order=None)
    if isinstance(weight, PackedInt4):
        y = _int4(x, weight)
    elif _fits_int8_kernel(x, weight):
        y = torch.ops.aten._weight_int8pack_mm(x.contiguous(), weight.values, weight.scales.flatten())
    else:
        return _wide(x, weight, bias)
    return y if bias is None else y.add_(bias)


def round_inputs(x: Tensor) -> Tensor:
    """[T, K] in float32, with each BLOCK inputs of a row rounded to multiples of their maximum / 127."""
    blocks = F.pad(x.float(), (0, -x.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    largest = torch.where(largest < SMALLEST_INPUT, 0, largest)
    by = torch.where(largest == 0, 0, (127 / largest.double()).float())
    made = (blocks * by).round_() * (largest * (1 / 127))
    return made.flatten(1)[:, : x.shape[1]]


def stacked_linear(
    linear: Callable[[Tensor, Any, Tensor | None], Tensor],
    x: Tensor,
    weight: StackedWeight,
    bias: Tensor | None,
) -> Tensor:
    """Semantics: x @ cat(parts).T + bias. linear: the linear layer of one part."""
    shifts = [None] * len(weight.rows) if bias is None else bias.split(weight.rows)
    pairs = zip(weight.parts, shifts, strict=True)
    return torch.cat([linear(x, part, shift) for part, shift in pairs], dim=1)


def _fits_int8_kernel(x: Tensor, weight: QuantisedWeight) -> bool:
    fits = weight.values.dtype == torch.int8 and weight.scales.shape[1] == 1
    fits = fits and weight.offsets is None and weight.zeros is None
    return fits and x.device.type == "cpu" and x.dtype == torch.bfloat16 and len(x) <= INT8_ROWS


def _int4(x: Tensor, weight: PackedInt4) -> Tensor:
    def multiply(rows: Tensor) -> Tensor:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(
            rows.contiguous(), weight.packed, weight.group_size, weight.table
        )

    return multiply(x) if len(x) <= INT4_ROWS else torch.cat([multiply(rows) for rows in x.split(INT4_ROWS)])


def _wide(x: Tensor, weight: QuantisedWeight, bias: Tensor | None) -> Tensor:
    rows, columns = weight.shape
    step = max(1, WIDE_ELEMENTS // columns)
    if step >= rows:
        return F.linear(x, weight.wide(), bias)
    y = torch.empty((len(x), rows), dtype=x.dtype, device=x.device)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        y[:, start:stop] = F.linear(x, weight.wide(start, stop), None if bias is None else bias[start:stop])
    return y
