"""Panels: the weight layout of the compiled CPU linear layer, and that layer.

A panel has the weights of `width` outputs. Those of each input are adjacent, so that a kernel reads the panel
once, in order, and sums `width` outputs in registers.
"""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from manylora.kernels import native
from manylora.kernels.quantised import BLOCK, QuantisedWeight
from manylora.kernels.transfer import huge_zeros

KINDS = (torch.float32, torch.bfloat16, torch.int8, torch.uint8)  # in the order of native/vectors.h
WORDS = {torch.bfloat16: torch.int32}  # dtypes stored as pairs of inputs -> dtype of a pair
CHUNK_BYTES = 2**21  # rows read at a time: they are still in the CPU cache when laid out
THREADS = 4
INT8_KIND, INT4_KIND, FLOAT4_KIND, UINT4_KIND, INT5_KIND, UINT5_KIND, INT6_KIND = range(2, 9)
FORMS, INTEGERS = 16, 3  # as in native/team.h
WHOLE, HALVED, CODED = range(3)  # how scales are stored, as in native/panels.h
BLOCK_ROOM = 19  # floats for 32 inputs of a row rounded to 8 bits
ROUNDED_INPUTS = 128  # minimum inputs of a layer that rounds them: smaller buffers do not fit


# GGUF's types that native/blocks.c lays out, in its order: kind, bits, inputs that share a scale, how scales
# are stored, has offsets.
BLOCKS = {
    "Q4_0": (INT4_KIND, 4, 32, HALVED, False), "Q4_1": (UINT4_KIND, 4, 32, HALVED, True),
    "Q5_0": (INT5_KIND, 5, 32, HALVED, False), "Q5_1": (UINT5_KIND, 5, 32, HALVED, True),
    "Q8_0": (INT8_KIND, 8, 32, HALVED, False), "Q4_K": (UINT4_KIND, 4, 32, CODED, True),
    "Q5_K": (UINT5_KIND, 5, 32, CODED, True), "Q6_K": (INT6_KIND, 6, 16, CODED, False),
}  # fmt: skip
CODED_INPUTS = 256  # of a block


class WeightRows(Protocol):
    """A plain weight [N, K] that is still in its file. streams: whether `read` works, or only `whole`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    streams: bool

    def read(self, start: int, out: Tensor) -> None:
        """Read rows [start, start + len(out)) into a contiguous CPU tensor. Thread-safe."""
        ...

    def whole(self) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Panels:
    """A weight [N, K] in float32, bfloat16, 8 or 4 bits, in the layout of native/panels.h, or in one of
    GGUF's types. 4 bits are float4 (e2m1); with offsets numbers from 0 to 15, which take fewer instructions;
    otherwise from -8 to 7.

    values:  [panels, K, width], zeros after the last row; for bfloat16 [panels, K / 2, width, 2]; for 4 bits
             uint8 [panels, K / 8, 4 * width]: words of 8 inputs, the first in the lowest bits.
    scales:  float32 [panels, groups, width], 8 and 4 bits only. offsets: the same, or None for 0.
    blocks:  the type in BLOCKS that values, scales and offsets have in the bytes of native/panels.h, or None.
    rows: N. columns: K.
    form: of products with rounded inputs: to bfloat16 (`compiled.FORMS`), or to 8 bits (INTEGERS, or with
             byte products INTEGERS + 1; with the layout of native/integer.c); 0: float32 inputs.
    """

    values: Tensor
    scales: Tensor | None
    offsets: Tensor | None
    rows: int
    columns: int
    form: int = 0
    float4: bool = False
    blocks: str | None = None

    @property
    def kind(self) -> int:
        """Its number in the compiled kernels."""
        kind = FLOAT4_KIND if self.float4 else KINDS.index(self.values.dtype)
        if self.values.dtype == torch.uint8 and self.offsets is not None:
            kind = UINT4_KIND
        if self.blocks is not None:
            kind = BLOCKS[self.blocks][0]
        return kind + FORMS * self.form

    def rounding(self, form: int) -> Panels:
        """The same weight for another form of products, if that form supports it."""
        fits = self.values.dtype != torch.float32 and self.columns >= ROUNDED_INPUTS
        return replace(self, form=form if fits else 0)

    @property
    def group_size(self) -> int:
        if self.blocks is not None:
            return BLOCKS[self.blocks][2]
        return self.columns if self.scales is None else self.columns // self.scales.shape[1]

    @property
    def stored_scales(self) -> int:
        return WHOLE if self.blocks is None else BLOCKS[self.blocks][3]

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns

    @property
    def dtype(self) -> torch.dtype:
        """Of its rows."""
        return self.values.dtype if self.scales is None else torch.float32

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.values, self.scales, self.offsets) if part is not None)


def look_up(ids: Tensor, table: Tensor | Panels) -> Tensor:
    """Rows of an embedding's table [V, K]; ids [T] -> [T, K]. Those of panels are float32; of a quantised
    table they have the bits of `QuantisedWeight.wide`.
    """
    if isinstance(table, Tensor):
        return F.embedding(ids, table)
    ids, rows = ids.to(torch.int64).contiguous(), torch.empty(len(ids), table.columns)
    library = native.load()
    assert library is not None, "only its kernels make panels"
    library.look_up_rows(
        table.kind, rows.data_ptr(), ids.data_ptr(), len(ids), table.values.data_ptr(),
        table.columns, table.rows, address(table.scales), address(table.offsets), table.group_size,
        table.stored_scales,
    )  # fmt: skip
    return rows


def to_panels(weight: Tensor | QuantisedWeight, width: int, block: int) -> Panels | None:
    """None if the compiled layer has no kernel for it. block: inputs that the kernel sums at a time."""
    rows, columns = weight.shape
    if isinstance(weight, Tensor):
        if weight.dtype not in KINDS:
            return None
        if columns % _inputs_per_word(weight.dtype):
            weight = weight.float()
        words = weight.contiguous().view(WORDS.get(weight.dtype, weight.dtype))
        return Panels(_unpaired(_to_width(words, width), weight.dtype), None, None, rows, columns)
    group = weight.group_size
    if weight.values.dtype not in KINDS or (block < group < columns and group % block):
        return None
    if weight.order is not None or (weight.codebook is not None and not weight.is_float4):
        return None
    scales, offsets, zeros = weight.scales.float(), weight.offsets, weight.zeros
    if zeros is not None or offsets is not None:
        low = 8 if weight.values.dtype == torch.uint8 else 0  # GGUF's zeros are -8: nothing is rounded
        below = scales * (low if zeros is None else low + zeros.float())
        offsets = (0 if offsets is None else offsets.float()) - below
    turned = None if offsets is None else _to_width(offsets, width)
    values = weight.values
    if values.dtype == torch.uint8:  # of 8 inputs at a time
        if columns % 8 or group % 8:
            return None
        values = values.contiguous().view(torch.int32)
    values = _to_width(values, width).view(weight.values.dtype)
    return Panels(values, _to_width(scales, width), turned, rows, columns, float4=weight.is_float4)


def lay_out_blocks(library: ctypes.CDLL, kind: str, data: Tensor, columns: int, form: int = 0) -> Panels:
    """A weight [N, columns] of a type in BLOCKS, with the values of gguf/blocks.py. data: uint8 [N, bytes per
    row], as in the file. form: 0, or of integer products.
    """
    width = library.panel_width()
    _, bits, group, stored, has_offsets = BLOCKS[kind]
    data, rows, panels = data.contiguous(), len(data), -(-len(data) // width)
    values = huge_zeros((panels, columns * bits // 8, width), torch.int8 if bits == 8 else torch.uint8)
    if stored == CODED:
        shape = panels, columns // CODED_INPUTS, 2 + CODED_INPUTS // group, width
    else:
        shape = panels, columns // group, 2, width
    scales = huge_zeros(shape, torch.uint8)
    offsets = huge_zeros(shape, torch.uint8) if has_offsets else None
    library.lay_out_blocks(
        list(BLOCKS).index(kind), form, values.data_ptr(), scales.data_ptr(), address(offsets),
        data.data_ptr(), rows, columns,
    )  # fmt: skip
    return Panels(values, scales, offsets, rows, columns, form, blocks=kind)


def read_panels(library: ctypes.CDLL, rows: WeightRows, width: int) -> Panels | None:
    """As `to_panels`, with several threads that each read some rows at a time."""
    if rows.dtype not in KINDS or not rows.dtype.is_floating_point or not rows.streams:
        return None
    (count, columns), inputs = rows.shape, _inputs_per_word(rows.dtype)
    if columns % inputs:
        return None
    words, panels, depth = WORDS.get(rows.dtype, rows.dtype), -(-count // width), columns // inputs
    size = words.itemsize
    values = huge_zeros((panels, depth, width), words)
    step = max(1, CHUNK_BYTES // (width * depth * size))  # panels

    def lay_out(first: int) -> None:
        start, stop = first * width, min(count, (first + step) * width)
        read = torch.empty(stop - start, columns, dtype=rows.dtype)
        rows.read(start, read)
        library.lay_out_panels(values[first].data_ptr(), read.data_ptr(), size, stop - start, depth)

    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        list(pool.map(lay_out, range(0, panels, step)))
    return Panels(_unpaired(values, rows.dtype), None, None, count, columns)


class PanelsLinear:
    """The compiled linear layer. It reuses the buffer for packed rows, so only one call may run at a time.

    library: the result of `native.load()`. block: inputs that the kernel sums at a time.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.width, self.block = library.panel_width(), library.panel_block()
        self._multiply = library.linear_layer
        self._room = torch.empty(0)

    def __call__(self, x: Tensor, weight: Panels, bias: Tensor | None) -> Tensor:
        """x [T, K] float32 -> [T, N] float32."""
        if x.stride(1) != 1:
            x = x.contiguous()
        y = torch.empty(x.shape[0], weight.rows)
        self._multiply(
            weight.kind, y.data_ptr(), weight.rows, x.data_ptr(), x.stride(0), x.shape[0],
            weight.values.data_ptr(), weight.columns, weight.rows,
            address(weight.scales), address(weight.offsets), self.room(x.shape[0], weight),
            weight.group_size, address(bias), weight.stored_scales,
        )  # fmt: skip
        return y

    def room(self, rows: int, weight: Panels) -> int:
        """Address of a call's buffer, for the packed rows and the sums of their blocks."""
        blocks = 0 if weight.offsets is None else -(-weight.columns // min(self.block, weight.group_size))
        size = rows * (weight.columns + blocks)
        if weight.form >= INTEGERS:
            size = rows * -(-weight.columns // BLOCK) * BLOCK_ROOM
        if self._room.numel() < size:
            self._room = torch.empty(size)
        return self._room.data_ptr()


def _to_width(matrix: Tensor, width: int) -> Tensor:
    """[N, C] -> [panels, C, width]."""
    rows, columns = matrix.shape
    panels, whole = -(-rows // width), rows // width
    turned = huge_zeros((panels, columns, width), matrix.dtype)
    turned[:whole].copy_(matrix[: whole * width].view(whole, width, columns).transpose(1, 2))
    if whole < panels:
        turned[whole].copy_(F.pad(matrix[whole * width :], (0, 0, 0, panels * width - rows)).T)
    return turned


def _inputs_per_word(dtype: torch.dtype) -> int:
    """How many inputs are stored together."""
    return WORDS.get(dtype, dtype).itemsize // dtype.itemsize


def _unpaired(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values if values.dtype == dtype else values.view(dtype).unflatten(2, (-1, _inputs_per_word(dtype)))


def address(part: Tensor | None) -> int | None:
    """A pointer for a compiled kernel; None becomes NULL."""
    return None if part is None else part.data_ptr()
