"""What torch alone does better than the reference on a CPU: packed weights, decoding sequences at once."""

from __future__ import annotations

import torch
from torch import Tensor

from manylora.kernels.quantised import QuantisedWeight, pack_for_cpu
from manylora.kernels.reference import ReferenceOps, attend
from manylora.kernels.spec import AttentionBatch, Weight

__all__ = ["CpuOps"]

PACKED = (torch.float32, torch.bfloat16)


class CpuOps(ReferenceOps):
    """Decoding rows are gathered into one batch; prompts are attended one by one."""

    def __init__(self) -> None:
        self._packs = torch.backends.mkldnn.is_available()
        self.has_bfloat16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()

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
        if len(single) == len(batch.kv_lens):
            lengths = list(batch.kv_lens)
            return self.decode(q, k_cache, v_cache, batch.block_table, lengths, scale, window, softcap)
        out = torch.empty_like(q)
        if single:
            rows = torch.tensor([starts[s] for s in single])
            lengths = [batch.kv_lens[s] for s in single]
            table = batch.block_table[torch.tensor(single)]
            out[rows] = self.decode(q[rows], k_cache, v_cache, table, lengths, scale, window, softcap)
        for s, kv_len in enumerate(batch.kv_lens):
            if starts[s + 1] - starts[s] > 1:
                span = slice(starts[s], starts[s + 1])
                blocks = batch.block_table[s]
                out[span] = self.attend_one(q[span], k_cache, v_cache, blocks, kv_len, scale, window, softcap)
        return out

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
        """One query for each sequence. q [S, Hq, D], table [S, blocks] -> [S, Hq, D]."""
        count, num_heads, dim = q.shape
        size, kv_heads = k_cache.shape[1:3]
        longest = max(lengths)
        used = table[:, : -(-longest // size)].long()
        k, v = (cache[used].to(q.dtype).flatten(1, 2)[:, :longest] for cache in (k_cache, v_cache))
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
