"""A CPU with the compiled kernels: linear layers, adapters, decode attention and row operations in float32.

The sums of a token's row are made in one order, whatever rows come with it: a decoding request gets the same
bits alone and in company. What is not float32 is `CpuOps`'s, and so is what the kernels do not know;
weights and adapters may be kept in fewer bits, which the kernels widen in registers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manylora.kernels.cpu import PLACE, CpuOps
from manylora.kernels.panels import Panels, WeightRows, panels_linear, read_panels, to_panels
from manylora.kernels.quantised import QuantisedWeight, StackedWeight
from manylora.kernels.spec import AttentionBatch, LoraBatch, LoraSegment, LoraTarget, Weight

__all__ = ["CompiledOps"]

FEW_ROWS = 64  # of one adapter; from there on a matrix product of torch is ahead
LARGEST_RANK = 1024  # room on the stack
ADAPTERS_KEPT = 1024
PART = np.dtype([("column", "i8"), ("width", "i8"), *PLACE.descr])
POOLS = {torch.float32: "lora_add_float32", torch.bfloat16: "lora_add_bfloat16"}

_Parts = tuple[Any, np.ndarray | None, int]  # rows of the adapter; its parts; how many, -1: not for us


class CompiledOps(CpuOps):
    """library: `native.load()`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__()
        self._library = library
        self._width, self._block = library.panel_width(), library.panel_block()
        self._scores = torch.empty(0)
        self._parts: dict[tuple[int, tuple[LoraTarget, ...]], dict[int, _Parts]] = {}

    def keeps(self, stored: torch.dtype, compute: torch.dtype) -> bool:
        """bfloat16 weights are widened to float32 in registers, exactly, and half the bytes are read."""
        return compute == torch.float32 and stored == torch.bfloat16

    def pack(self, weight: Tensor | QuantisedWeight | StackedWeight, routed: bool = False) -> Weight:
        if isinstance(weight, StackedWeight):
            return weight.map(self.pack)
        if isinstance(weight, QuantisedWeight) and weight.scales.dtype != torch.float32:
            return super().pack(weight)
        if isinstance(weight, Tensor) and weight.dtype == torch.bfloat16 and self.has_bfloat16:
            return super().pack(weight)
        return to_panels(weight, self._width, self._block) or super().pack(weight)

    def pack_rows(self, rows: WeightRows, routed: bool = False) -> Weight:
        panels = None
        if not (rows.dtype == torch.bfloat16 and self.has_bfloat16):
            panels = read_panels(self._library, rows, self._width)
        return super().pack_rows(rows, routed) if panels is None else panels

    def linear(self, x: Tensor, packed: Weight, bias: Tensor | None) -> Tensor:
        if not isinstance(packed, Panels):
            return super().linear(x, packed, bias)
        if x.dtype == torch.float32:
            return panels_linear(self._library, x, packed, bias, self._block)
        wide = None if bias is None else bias.float()
        return panels_linear(self._library, x.float(), packed, wide, self._block).to(x.dtype)

    def lora_add(
        self,
        y: Tensor,
        x: Tensor,
        batch: LoraBatch,
        layer: int,
        targets: Sequence[LoraTarget],
        bias: Tensor | None = None,
    ) -> None:
        if not _can_add(x, batch.pool):
            super().lora_add(y, x, batch, layer, targets, bias)
            return
        table = self._parts.setdefault((layer, tuple(targets)), {})
        ours: list[tuple[int, int, int, int]] = []
        others: list[LoraSegment] = []
        kept: list[np.ndarray] = []
        most = rows = 0
        for segment in batch.segments:
            known = table.get(id(segment.rows))
            if known is None or known[0] is not segment.rows:
                known = self._find_parts(table, segment, layer, targets)
            _, parts, count = known
            height = segment.stop - segment.start
            if count < 0 or height > FEW_ROWS:
                others.append(segment)
            elif parts is not None:
                kept.append(parts)
                ours.append((segment.start, segment.stop, parts.ctypes.data, count))
                most, rows = max(most, count), max(rows, height)
        if ours:
            segments = np.array(ours, np.int64)
            getattr(self._library, POOLS[batch.pool.dtype])(
                y.data_ptr(), y.stride(0), x.data_ptr(), x.stride(0), x.shape[1], batch.pool.data_ptr(),
                segments.ctypes.data, len(ours), most, rows,
            )  # fmt: skip
        if others:
            super().lora_add(y, x, LoraBatch(batch.pool, tuple(others)), layer, targets, bias)

    def add_groups(
        self, y: Tensor, x: Tensor, pool: Tensor, groups: np.ndarray, places: np.ndarray, target: LoraTarget
    ) -> None:
        if not _can_add(x, pool) or places["rank"].max() > LARGEST_RANK:
            super().add_groups(y, x, pool, groups, places, target)
            return
        count = len(groups)
        parts = np.empty(count, PART)
        parts["column"], parts["width"] = target.start, target.width
        for name in PLACE.fields or ():
            parts[name] = places[name]
        segments = np.empty((count, 4), np.int64)
        segments[:, :2], segments[:, 3] = groups, 1
        segments[:, 2] = parts.ctypes.data + np.arange(count) * parts.strides[0]
        getattr(self._library, POOLS[pool.dtype])(
            y.data_ptr(), y.stride(0), x.data_ptr(), x.stride(0), x.shape[1], pool.data_ptr(),
            segments.ctypes.data, count, 1, int((groups[:, 1] - groups[:, 0]).max()),
        )  # fmt: skip

    def store_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch) -> None:
        if not k.dtype == k_cache.dtype == torch.float32 or not (_whole_rows(k) and _whole_rows(v)):
            super().store_kv(k, v, k_cache, v_cache, batch)
            return
        for x, cache in ((k, k_cache), (v, v_cache)):
            self._library.store_rows(
                cache.data_ptr(), x.data_ptr(), x.stride(0), batch.slots.data_ptr(), len(x), x[0].numel()
            )

    def decode(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        table: Tensor,
        lengths: list[int],
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        if not q.dtype == k_cache.dtype == torch.float32 or softcap is not None:
            return super().decode(q, k_cache, v_cache, table, lengths, scale, window, softcap)
        q, table = q.contiguous(), table.contiguous()
        count, heads, dim = q.shape
        size, kv_heads = k_cache.shape[1:3]
        longest = max(lengths)
        if self._scores.numel() < count * heads * longest:
            self._scores = torch.empty(2 * count * heads * longest)
        out, ends = torch.empty_like(q), np.array(lengths, np.int64)
        self._library.decode_attention(
            out.data_ptr(), heads * dim, q.data_ptr(), heads * dim, k_cache.data_ptr(), v_cache.data_ptr(),
            table.data_ptr(), table.shape[1], ends.ctypes.data, count, heads, kv_heads, dim, size, scale,
            -1 if window is None else window, self._scores.data_ptr(), longest,
        )  # fmt: skip
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype != torch.float32 or x.dim() != 2 or x.stride(1) != 1:
            return super().rms_norm(x, weight, eps)
        out = torch.empty(x.shape)
        self._library.rms_norm(
            out.data_ptr(), x.data_ptr(), x.stride(0), weight.data_ptr(), x.shape[0], x.shape[1], eps
        )
        return out

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if x.dtype != torch.float32 or x.stride(2) != 1:
            return super().rotary(x, cos, sin)
        out = torch.empty(x.shape)
        self._library.rotary(
            out.data_ptr(), x.data_ptr(), x.stride(0), x.stride(1), cos.data_ptr(), sin.data_ptr(), *x.shape
        )
        return out

    @staticmethod
    def _find_parts(
        table: dict[int, _Parts], segment: LoraSegment, layer: int, targets: Sequence[LoraTarget]
    ) -> _Parts:
        """The adapter's matrices for these targets. Kept with `rows` itself, so that its id stays its own."""
        if len(table) >= ADAPTERS_KEPT:
            table.clear()
        found = [(t, segment.rows.get((layer, t.module_id))) for t in targets]
        places = [
            (t.start, t.width, row.offset, row.rank, row.float8, row.scale, row.dora)
            for t, row in found
            if row is not None
        ]
        columns = sorted((start, start + width) for start, width, *_ in places)
        shared = any(stop > start for (_, stop), (start, _) in pairwise(columns))  # threads would collide
        if shared or any(dora or rank > LARGEST_RANK for _, _, _, rank, _, _, dora in places):
            known: _Parts = (segment.rows, None, -1)
        elif places:
            known = (segment.rows, np.array([place[:-1] for place in places], PART), len(places))
        else:
            known = (segment.rows, None, 0)
        table[id(segment.rows)] = known
        return known


def _can_add(x: Tensor, pool: Tensor) -> bool:
    return x.dtype == torch.float32 and pool.dtype in POOLS and x.stride(1) == 1


def _whole_rows(x: Tensor) -> bool:
    """Whether each row [heads, dim] is one run of memory."""
    return x.stride(2) == 1 and x.stride(1) == x.shape[2]
