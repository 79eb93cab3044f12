"""The reference with what is worth doing better on a CPU: decode attention for all sequences at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from manylora.kernels.reference import ReferenceOps
from manylora.kernels.spec import AttentionBatch

__all__ = ["CpuOps"]


class CpuOps(ReferenceOps):
    """Decoding rows are gathered into one padded batch; prompts are attended one by one."""

    def attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int | None,
    ) -> Tensor:
        starts = batch.query_starts
        single = [s for s in range(len(batch.kv_lens)) if starts[s + 1] - starts[s] == 1]
        out = torch.empty_like(q)
        if single:
            rows = torch.tensor([starts[s] for s in single], device=q.device)
            lengths = [batch.kv_lens[s] for s in single]
            table = batch.block_table[torch.tensor(single, device=q.device)]
            out[rows] = self._decode(q[rows], k_cache, v_cache, table, lengths, scale, window)
        for s, kv_len in enumerate(batch.kv_lens):
            if starts[s + 1] - starts[s] > 1:
                span = slice(starts[s], starts[s + 1])
                blocks = batch.block_table[s]
                out[span] = self.attend_one(q[span], k_cache, v_cache, blocks, kv_len, scale, window)
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
        mixed = F.scaled_dot_product_attention(
            q.view(count, kv_heads, num_heads // kv_heads, dim),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask[:, None, None, :],
            scale=scale,
        )
        return mixed.reshape(count, num_heads, dim)
