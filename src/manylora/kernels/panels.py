"""Weights as the compiled linear layer of CPUs reads them, and that layer."""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from manylora.kernels.quantised import QuantisedWeight

__all__ = ["Panels", "WeightRows", "panels_linear", "read_panels", "to_panels"]

KINDS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.int8: "int8"}


CHUNK_BYTES = 2**21  # of rows that are read before they are laid out: they are still in the cache then
THREADS = 4


class WeightRows(Protocol):
    """A plain weight [N, K] that is not in memory yet. streams: `read` works, else only `whole`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    streams: bool

    def read(self, start: int, out: Tensor) -> None:
        """Rows [start, start + len(out)) into a contiguous tensor on the CPU. Any thread."""
        ...

    def whole(self) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Panels:
    """A weight [N, K] in float32, bfloat16, or int8 with a scale for each row, laid out for native/linear.c.

    values: [panels, K, width], zeros past the last row. scale: float32 [N], int8 only. rows: N.
    """

    values: Tensor
    scale: Tensor | None
    rows: int

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.scale is None else self.scale.nbytes)


def to_panels(weight: Tensor | QuantisedWeight, width: int) -> Panels | None:
    """None where the compiled layer has no kernel for it."""
    scale = None
    if isinstance(weight, QuantisedWeight):
        scales = weight.scales
        extra = weight.offsets is not None or weight.zeros is not None or weight.order is not None
        if weight.values.dtype != torch.int8 or scales.shape[1] != 1 or extra:
            return None
        weight, scale = weight.values, scales[:, 0].float().contiguous()
    if weight.dtype not in KINDS:
        return None
    rows, columns = weight.shape
    panels = -(-rows // width)
    values = torch.empty(panels, columns, width, dtype=weight.dtype)
    whole = rows // width
    values[:whole].copy_(weight[: whole * width].view(whole, width, columns).transpose(1, 2))
    if whole < panels:
        values[whole].copy_(F.pad(weight[whole * width :], (0, 0, 0, panels * width - rows)).T)
    return Panels(values, scale, rows)


def read_panels(library: ctypes.CDLL, rows: WeightRows, width: int) -> Panels | None:
    """As `to_panels`, by several threads, with some rows at a time in memory twice."""
    if rows.dtype not in KINDS or not rows.streams:
        return None
    count, columns = rows.shape
    panels, size = -(-count // width), rows.dtype.itemsize
    # NumPy's memory, because it asks the system for large pages: fewer faults here, fewer misses later.
    room = np.empty((panels, columns, width * size), np.uint8)
    values = torch.from_numpy(room).view(rows.dtype)
    step = max(1, CHUNK_BYTES // (width * columns * size))  # panels

    def lay_out(first: int) -> None:
        start, stop = first * width, min(count, (first + step) * width)
        read = torch.empty(stop - start, columns, dtype=rows.dtype)
        rows.read(start, read)
        library.lay_out_panels(values[first].data_ptr(), read.data_ptr(), size, stop - start, columns)

    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        list(pool.map(lay_out, range(0, panels, step)))
    return Panels(values, None, count)


def panels_linear(library: ctypes.CDLL, x: Tensor, weight: Panels, bias: Tensor | None) -> Tensor:
    """x [T, K] float32 -> [T, N] float32."""
    if x.stride(1) != 1:
        x = x.contiguous()
    y = torch.empty(x.shape[0], weight.rows)
    getattr(library, "linear_" + KINDS[weight.values.dtype])(
        y.data_ptr(), weight.rows, x.data_ptr(), x.stride(0), x.shape[0], weight.values.data_ptr(),
        x.shape[1], weight.rows, None if weight.scale is None else weight.scale.data_ptr(),
        None if bias is None else bias.data_ptr(),
    )  # fmt: skip
    return y
