"""Every op in plain PyTorch, line for line as `spec` says it: the oracle, and a device of last resort."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from manylora.kernels.quantised import QuantisedWeight, quantised_linear
from manylora.kernels.spec import AttentionBatch, LoraBatch, LoraRow, LoraTarget, Weight

__all__ = ["ReferenceOps", "attend"]


class ReferenceOps:
    """Runs on any torch device."""

    def pack(self, weight: Tensor | QuantisedWeight) -> Weight:
        return weight

    def linear(self, x: Tensor, packed: Weight, bias: Tensor | None) -> Tensor:
        if not isinstance(packed, Tensor):
            return quantised_linear(x, packed, bias)
        return F.linear(x, packed, bias)

    def lora_add(
        self,
        y: Tensor,
        x: Tensor,
        batch: LoraBatch,
        layer: int,
        targets: Sequence[LoraTarget],
        bias: Tensor | None = None,
    ) -> None:
        for segment in batch.segments:
            rows = x[segment.start : segment.stop]
            for target in targets:
                row = segment.rows.get((layer, target.module_id))
                if row is None:
                    continue
                columns = slice(target.start, target.start + target.width)
                a, b, magnitude = _matrices(batch.pool, row, x.shape[-1], target.width)
                out = y[segment.start : segment.stop, columns]
                out.addmm_(rows @ a.T, b)
                if magnitude is not None:
                    shift = bias[columns] if bias is not None else 0
                    out.copy_((out - shift) * magnitude + shift)

    def store_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch) -> None:
        k_cache.view(-1, *k.shape[1:]).index_copy_(0, batch.slots, k)
        v_cache.view(-1, *v.shape[1:]).index_copy_(0, batch.slots, v)

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
        out = torch.empty_like(q)
        for s, kv_len in enumerate(batch.kv_lens):
            rows = slice(batch.query_starts[s], batch.query_starts[s + 1])
            out[rows] = self.attend_one(
                q[rows], k_cache, v_cache, batch.block_table[s], kv_len, scale, window, softcap
            )
        return out

    def attend_one(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        blocks: Tensor,
        kv_len: int,
        scale: float,
        window: int | None,
        softcap: float | None = None,
    ) -> Tensor:
        """One sequence: the last rows of its kv_len tokens are the queries. q [n, Hq, D] -> [n, Hq, D].

        The G query heads of one key head are laid out as G * n rows, so keys are never repeated.
        """
        count, num_heads, dim = q.shape
        size, kv_heads = k_cache.shape[1:3]
        groups = num_heads // kv_heads
        used = blocks[: -(-kv_len // size)].long()
        k = k_cache[used].flatten(0, 1)[:kv_len].transpose(0, 1)
        v = v_cache[used].flatten(0, 1)[:kv_len].transpose(0, 1)
        queries = (
            q.view(count, kv_heads, groups, dim).permute(1, 2, 0, 3).reshape(kv_heads, groups * count, dim)
        )
        keys = torch.arange(kv_len, device=q.device)
        last = torch.arange(kv_len - count, kv_len, device=q.device).unsqueeze(1)
        mask = keys <= last
        if window is not None:
            mask &= keys > last - window
        mixed = attend(
            queries.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), mask.repeat(groups, 1), scale, softcap
        )
        return mixed.view(kv_heads, groups, count, dim).permute(2, 0, 1, 3).reshape(count, num_heads, dim)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (weight * normed.to(weight.dtype)).to(x.dtype)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return F.layer_norm(x, weight.shape, weight, bias, eps)

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x1, x2 = x.chunk(2, dim=-1)
        return x * cos.unsqueeze(1) + torch.cat((-x2, x1), dim=-1) * sin.unsqueeze(1)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float | None) -> Tensor:
    """softmax(scores) v over the last two dims, masked; with a softcap the scores are capped first."""
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = softcap * torch.tanh(q @ k.transpose(-1, -2) * (scale / softcap))
    return torch.softmax(scores.float().masked_fill(~mask, float("-inf")), dim=-1).to(v.dtype) @ v


def _matrices(pool: Tensor, row: LoraRow, in_dim: int, out_dim: int) -> tuple[Tensor, Tensor, Tensor | None]:
    middle = row.offset + row.rank * in_dim
    end = middle + row.rank * out_dim
    a = pool[row.offset : middle].view(row.rank, in_dim)
    b = pool[middle:end].view(row.rank, out_dim)
    return a, b, pool[end : end + out_dim] if row.dora else None
