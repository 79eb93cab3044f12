"""What is worth doing better than the reference on a CPU: packed weights, few rows of an adapter, decoding.

Weights are packed once for oneDNN, which then loses no time on small batches. Adapters and decode attention
go to compiled kernels in float32 where they could be built (`native`), else to torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from manylora.kernels import native
from manylora.kernels.quantised import QuantisedWeight, pack_for_cpu
from manylora.kernels.reference import ReferenceOps, attend
from manylora.kernels.spec import AttentionBatch, LoraBatch, LoraSegment, LoraTarget, Weight

__all__ = ["CpuOps"]

# From so many rows of one adapter on, a matrix product of torch beats row by row.
FEW_ROWS = 8
PACKED = (torch.float32, torch.bfloat16)


class CpuOps(ReferenceOps):
    """Decoding rows are gathered into one batch; prompts are attended one by one."""

    def __init__(self) -> None:
        self._native = native.load()
        self._packs = torch.backends.mkldnn.is_available()
        self._scores = torch.empty(0)

    def pack(self, weight: Tensor | QuantisedWeight) -> Weight:
        if isinstance(weight, QuantisedWeight):
            return pack_for_cpu(weight)
        if not self._packs or weight.dtype not in PACKED:
            return weight
        return torch.ops.mkldnn._reorder_linear_weight(weight)

    def linear(self, x: Tensor, packed: Weight, bias: Tensor | None) -> Tensor:
        if not isinstance(packed, Tensor) or not packed.is_mkldnn:
            return super().linear(x, packed, bias)
        return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")

    def lora_add(
        self,
        y: Tensor,
        x: Tensor,
        batch: LoraBatch,
        layer: int,
        targets: Sequence[LoraTarget],
        bias: Tensor | None = None,
    ) -> None:
        few: list[LoraSegment] = []
        rest: list[LoraSegment] = []
        for segment in batch.segments:
            plain = not any(row.dora for row in segment.rows.values())
            (few if plain and segment.stop - segment.start < FEW_ROWS else rest).append(segment)
        if self._native is None or x.dtype != torch.float32 or x.stride(1) != 1:
            few, rest = [], list(batch.segments)
        if few:
            self._add_few(y, x, LoraBatch(batch.pool, tuple(few)), layer, targets)
        if rest:
            super().lora_add(y, x, LoraBatch(batch.pool, tuple(rest)), layer, targets, bias)

    def attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int | None,
        softcap: float | None = None,
    ) -> Tensor:
        starts = batch.query_starts
        single = [s for s in range(len(batch.kv_lens)) if starts[s + 1] - starts[s] == 1]
        out = torch.empty_like(q)
        if single:
            rows = torch.tensor([starts[s] for s in single])
            lengths = [batch.kv_lens[s] for s in single]
            table = batch.block_table[torch.tensor(single)]
            if self._native is None or q.dtype != torch.float32 or softcap is not None:
                out[rows] = self._decode(q[rows], k_cache, v_cache, table, lengths, scale, window, softcap)
            else:
                out[rows] = self._decode_native(q[rows], k_cache, v_cache, table, lengths, scale, window)
        for s, kv_len in enumerate(batch.kv_lens):
            if starts[s + 1] - starts[s] > 1:
                span = slice(starts[s], starts[s + 1])
                blocks = batch.block_table[s]
                out[span] = self.attend_one(q[span], k_cache, v_cache, blocks, kv_len, scale, window, softcap)
        return out

    def _add_few(
        self, y: Tensor, x: Tensor, batch: LoraBatch, layer: int, targets: Sequence[LoraTarget]
    ) -> None:
        """Segments of few rows, without DoRA; rows of y are disjoint, so threads share nothing."""
        segments: list[tuple[int, int, int, int]] = []
        parts: list[tuple[int, int, int, int]] = []
        for segment in batch.segments:
            first = len(parts)
            for target in targets:
                row = segment.rows.get((layer, target.module_id))
                if row is not None:
                    parts.append((target.start, target.width, row.offset, row.rank))
            if len(parts) > first:
                segments.append((segment.start, segment.stop, first, len(parts) - first))
        if not segments:
            return
        table, places = np.array(segments, np.int64), np.array(parts, np.int64)
        assert self._native is not None
        self._native.lora_add(
            _pointer(y), ctypes.c_int64(y.stride(0)), _pointer(x), ctypes.c_int64(x.stride(0)),
            ctypes.c_int64(x.shape[1]), _pointer(batch.pool), ctypes.c_void_p(table.ctypes.data),
            ctypes.c_int64(len(segments)), ctypes.c_void_p(places.ctypes.data),
        )  # fmt: skip

    def _decode_native(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        table: Tensor,
        lengths: list[int],
        scale: float,
        window: int | None,
    ) -> Tensor:
        """One query for each sequence, over the pages in place. Shapes as `_decode`."""
        count, heads, dim = q.shape
        size, kv_heads = k_cache.shape[1:3]
        longest = max(lengths)
        needed = count * heads * longest
        if self._scores.numel() < needed:
            self._scores = torch.empty(2 * needed)
        out, table = torch.empty_like(q), table.contiguous()
        ends = np.array(lengths, np.int64)
        number = ctypes.c_int64
        assert self._native is not None
        self._native.decode_attention(
            _pointer(out), number(heads * dim), _pointer(q), number(heads * dim), _pointer(k_cache),
            _pointer(v_cache), _pointer(table), number(table.shape[1]), ctypes.c_void_p(ends.ctypes.data),
            number(count), number(heads), number(kv_heads), number(dim), number(size), ctypes.c_float(scale),
            number(-1 if window is None else window), _pointer(self._scores), number(longest),
        )  # fmt: skip
        return out

    def _decode(
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
        """One query for each sequence. q [S, Hq, D], table [S, blocks] -> [S, Hq, D]."""
        count, num_heads, dim = q.shape
        size, kv_heads = k_cache.shape[1:3]
        longest = max(lengths)
        used = table[:, : -(-longest // size)].long()
        k, v = (cache[used].flatten(1, 2)[:, :longest] for cache in (k_cache, v_cache))
        ends = torch.tensor(lengths, device=q.device).unsqueeze(1)
        keys = torch.arange(longest, device=q.device)
        mask = keys < ends
        if window is not None:
            mask &= keys >= ends - window
        # Padding shows blocks of strangers: a NaN there must not reach this sequence through 0 * NaN.
        hidden = ~(keys < ends)
        if hidden.any():
            k[hidden] = 0
            v[hidden] = 0
        queries = q.view(count, kv_heads, num_heads // kv_heads, dim)
        mixed = attend(queries, k.transpose(1, 2), v.transpose(1, 2), mask[:, None, None, :], scale, softcap)
        return mixed.reshape(count, num_heads, dim)


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
