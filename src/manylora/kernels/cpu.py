"""CpuOps: CPU operations with torch only, with packed weights and batched decode attention."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import zip_longest

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from manylora.kernels.lora import HostPairs, as_encoded
from manylora.kernels.quantised import QuantisedWeight, StackedWeight, pack_for_cpu
from manylora.kernels.reference import ReferenceOps, attend, gather
from manylora.kernels.row_format import TABLE_ROW, RowFormat
from manylora.kernels.spec import (
    AttentionBatch,
    AttentionParams,
    BatchLimits,
    ExpertPairs,
    LoraBatch,
    LoraTarget,
    Targets,
    Weight,
)

FEW_ROWS = 8  # of one expert and adapter; with more rows a separate matrix product is faster
NO_ROW = RowFormat(0).table_row(0)


class CpuOps(ReferenceOps):
    """Attention of decoding rows is one batched operation. Prompts are computed one by one."""

    def __init__(self) -> None:
        self._chunk_tokens = BatchLimits.chunk_tokens
        self._packs = _packs()
        self.has_bfloat16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()

    def reserve(self, limits: BatchLimits, device: torch.device) -> None:
        self._chunk_tokens = limits.chunk_tokens

    def pack(self, weight: Tensor | QuantisedWeight | StackedWeight, routed: bool = False) -> Weight:
        if isinstance(weight, StackedWeight):
            return weight.map(self.pack)
        if isinstance(weight, QuantisedWeight):
            return pack_for_cpu(weight)
        return _pack(weight) if weight.dtype == torch.float32 and self._packs else weight

    def linear(self, x: Tensor, packed: Weight, bias: Tensor | None) -> Tensor:
        if not isinstance(packed, Tensor) or not packed.is_mkldnn:
            return super().linear(x, packed, bias)
        return _multiply(x, packed, bias)

    def expert_lora_add(
        self, y: Tensor, x: Tensor, batch: LoraBatch, pairs: ExpertPairs, layer: int, targets: Targets
    ) -> None:
        """Groups with many rows are computed one by one, and those of a mix with DoRA, whose adapters act on
        the base's output at once; groups with few rows together. When decoding, all have few.
        """
        assert isinstance(pairs, HostPairs)
        groups = pairs.groups
        few = groups[:, 1] - groups[:, 0] < FEW_ROWS
        found = [[one.rows.get((layer, target.module_id)) for one in batch.segments] for target in targets]
        weighed = [number for rows in found for number, row in enumerate(rows) if row and row.weighs_base]
        if weighed:
            few &= ~np.isin(groups[:, 3], weighed)
        if few.any():
            for target, rows in zip(targets, found, strict=True):
                for places in zip_longest(*(row.members if row else () for row in rows)):
                    entries = [row.format.table_row(row.offset) if row else NO_ROW for row in places]
                    table = np.array(entries, TABLE_ROW)
                    self._add_small_groups(y, x, batch.pool, groups[few], table, target)
        if not few.all():
            super().expert_lora_add(y, x, batch, replace(pairs, groups=groups[~few]), layer, targets)

    def attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, params: AttentionParams
    ) -> Tensor:
        if len(q) == len(batch.kv_lens):
            lengths = list(batch.kv_lens)
            return self.decode(q, k_cache, v_cache, batch.block_table, lengths, params)
        pieces = _pieces(batch, self._chunk_tokens)
        short = self.rows_alone(q, k_cache)
        out = torch.empty_like(q)
        # Separate, because scores take memory for all rows times the longest sequence among them.
        decoding = [(s, start, kv_len) for s, start, stop, kv_len in pieces if stop - start == 1]
        prompts = [
            (s, row, kv_len - stop + row + 1)
            for s, start, stop, kv_len in pieces
            if stop - start > 1 and kv_len <= short
            for row in range(start, stop)
        ]
        for single in filter(None, (decoding, prompts)):
            sequences, first, lengths = map(list, zip(*single, strict=True))
            rows, table = torch.tensor(first), batch.block_table[torch.tensor(sequences)]
            out[rows] = self.decode(q[rows], k_cache, v_cache, table, lengths, params)
        for s, start, stop, kv_len in pieces:
            if stop - start > 1 and kv_len > short:
                blocks = batch.block_table[s]
                out[start:stop] = self.attend_one(q[start:stop], k_cache, v_cache, blocks, kv_len, params)
        return out

    def rows_alone(self, q: Tensor, k_cache: Tensor) -> int:
        """With at most this many keys, the rows of a prompt are computed one by one, like decoding rows."""
        return 0

    def attend_one(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        blocks: Tensor,
        kv_len: int,
        params: AttentionParams,
    ) -> Tensor:
        """As the reference. A whole prompt uses torch's causal kernel, which skips keys after a query."""
        count, window = q.shape[0], params.window
        scored = params.softcap is not None or params.sinks is not None
        if kv_len > count or (window is not None and window < count) or scored:
            return super().attend_one(q, k_cache, v_cache, blocks, kv_len, params)
        k, v = (gather(cache, blocks, count, q.dtype) for cache in (k_cache, v_cache))
        mixed = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None], k[None], v[None], is_causal=True, scale=params.scale, enable_gqa=True
        )
        return mixed[0].transpose(0, 1)

    def add_groups(
        self, y: Tensor, x: Tensor, pool: Tensor, groups: np.ndarray, places: np.ndarray, target: LoraTarget
    ) -> None:
        """Add the adapters of groups with few rows. groups [G, 2]: start, stop. places [G] TABLE_ROW: the
        matrices of each group's expert and adapter, with ranks above 0.
        """
        kinds = places[["rank", "encoding", "dora"]]
        for kind in np.unique(kinds):
            alike = kinds == kind
            _add_batched(y, x, pool, groups[alike], places[alike], target)

    def _add_small_groups(
        self, y: Tensor, x: Tensor, pool: Tensor, groups: np.ndarray, table: np.ndarray, target: LoraTarget
    ) -> None:
        """groups [G, 4] as in ExpertPairs. table [segments] of TABLE_ROW: the target's rows."""
        places = table[groups[:, 3]]
        sizes = places["rank"] * (x.shape[1] + target.width) + (places["dora"] > 0) * target.width
        places["offset"] += groups[:, 2] * sizes
        there = places["rank"] > 0
        if there.any():
            self.add_groups(y, x, pool, groups[there, :2], places[there], target)

    def decode(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        table: Tensor,
        lengths: list[int],
        params: AttentionParams,
    ) -> Tensor:
        """One query per sequence. q [S, Hq, D], table [S, blocks] -> [S, Hq, D]."""
        count, num_heads, dim = q.shape
        size, kv_heads = k_cache.shape[1:3]
        longest = max(lengths)
        used = table[:, : -(-longest // size)].long()
        k, v = (cache[used].to(q.dtype).flatten(1, 2)[:, :longest] for cache in (k_cache, v_cache))
        ends = torch.tensor(lengths, device=q.device).unsqueeze(1)
        keys = torch.arange(longest, device=q.device)
        mask = keys < ends
        if params.window is not None:
            mask &= keys >= ends - params.window
        # Padded entries point to other sequences' blocks. A NaN there would spread through 0 * NaN.
        hidden = ~(keys < ends)
        if hidden.any():
            k[hidden] = 0
            v[hidden] = 0
        queries = q.view(count, kv_heads, num_heads // kv_heads, dim)
        sinks = None if params.sinks is None else params.sinks.view(1, kv_heads, -1)
        mixed = attend(queries, k.transpose(1, 2), v.transpose(1, 2), mask[:, None, None, :], params, sinks)
        return mixed.reshape(count, num_heads, dim)


def _pieces(batch: AttentionBatch, size: int) -> list[tuple[int, int, int, int]]:
    """Pieces of each sequence's rows: the sequence, the first row, the row after the last, and the visible
    tokens.

    Pieces end at positions that are multiples of `size`. torch's products depend on their shapes, so this
    makes a row independent of how much of its prompt is in one step.
    """
    found = []
    for s, kv_len in enumerate(batch.kv_lens):
        stop = batch.query_starts[s + 1]
        position = kv_len - (stop - batch.query_starts[s])
        while position < kv_len:
            end = min(kv_len, (position // size + 1) * size)
            found.append((s, stop - kv_len + position, stop - kv_len + end, end))
            position = end
    return found


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight)


def _multiply(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


@cache
def _packs() -> bool:
    """Whether oneDNN is available, packs float32 weights on this processor and multiplies correctly."""
    x, weight = torch.linspace(-1, 1, 2 * 64).view(2, 64), torch.linspace(-1, 1, 64 * 64).view(64, 64)
    try:
        found = _multiply(x, _pack(weight), None)
    except (RuntimeError, AttributeError):
        return False
    return torch.allclose(found, F.linear(x, weight), rtol=1e-4, atol=1e-4)


def _add_batched(
    y: Tensor, x: Tensor, pool: Tensor, groups: np.ndarray, table: np.ndarray, target: LoraTarget
) -> None:
    """Compute groups of one rank and encoding, all with DoRA or none, as a batched product, padded to the
    longest group. The padding is always less than FEW_ROWS rows.
    """
    rank, encoding = int(table["rank"][0]), int(table["encoding"][0])
    pool = as_encoded(pool, encoding)
    in_dim, starts, counts = x.shape[1], groups[:, 0], groups[:, 1] - groups[:, 0]
    places = torch.from_numpy(starts[:, None] + np.arange(counts.max())).clamp_(max=len(x) - 1)
    real = torch.from_numpy(np.arange(counts.max()) < counts[:, None])
    size = rank * (in_dim + target.width)
    pieces = torch.stack([pool[offset : offset + size].to(x.dtype) for offset in table["offset"].tolist()])
    a, b = pieces.split((rank * in_dim, rank * target.width), dim=1)
    low = torch.bmm(x[places], a.view(-1, rank, in_dim).transpose(1, 2))
    if (table["scale"] != 1).any():
        low *= torch.from_numpy(table["scale"].copy()).to(x.dtype).view(-1, 1, 1)
    delta = torch.bmm(low, b.view(-1, rank, target.width))
    out = y[:, target.start : target.start + target.width]
    out.index_add_(0, places[real], delta[real])
    if table["dora"][0]:
        ends = [pool[offset + size :][: target.width].to(x.dtype) for offset in table["offset"].tolist()]
        out[places[real]] *= torch.stack(ends).unsqueeze(1).expand_as(delta)[real]
