"""ReferenceOps: every operation in plain PyTorch, as `spec` defines it.

Faster versions are tested against it, and it runs where there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from manylora.kernels.activations import ACTIVATIONS
from manylora.kernels.experts import HostPairs, group_segments, pair_up
from manylora.kernels.panels import Panels, WeightRows
from manylora.kernels.quantised import (
    QuantisedWeight,
    StackedWeight,
    quantised_linear,
    stacked_linear,
)
from manylora.kernels.row_format import Encoding
from manylora.kernels.spec import (
    AttentionBatch,
    AttentionParams,
    BatchLimits,
    ExpertPairs,
    LoraBatch,
    LoraRow,
    Rotary,
    Targets,
    Weight,
)

FP8, FP8_MAX = torch.float8_e4m3fn, 448.0


class ReferenceOps:
    """For any torch device. It reads the host's batch tables, so `plan` adds nothing."""

    def reserve(self, limits: BatchLimits, device: torch.device) -> None:
        pass

    def plan(
        self, attention: AttentionBatch, lora: LoraBatch | None, fixed: bool = False
    ) -> tuple[AttentionBatch, LoraBatch | None]:
        if fixed:
            raise NotImplementedError("the reference reads host tables, which a recorded graph cannot change")
        return attention, lora

    def trials(self) -> AbstractContextManager[bool]:
        return nullcontext(False)

    has_bfloat16 = True

    def keeps(self, stored: torch.dtype, compute: torch.dtype) -> bool:
        return stored == compute

    def pack(self, weight: Tensor | QuantisedWeight | StackedWeight, routed: bool = False) -> Weight:
        return weight

    def pack_rows(self, rows: WeightRows, routed: bool = False) -> Weight:
        return self.pack(rows.whole(), routed)

    def linear(self, x: Tensor, packed: Weight, bias: Tensor | None) -> Tensor:
        if isinstance(packed, StackedWeight):
            return stacked_linear(self.linear, x, packed, bias)
        if not isinstance(packed, Tensor):
            assert not isinstance(packed, Panels)
            return quantised_linear(x, packed, bias)
        return F.linear(x, packed, bias)

    def lora_add(
        self, y: Tensor, x: Tensor, batch: LoraBatch, layer: int, targets: Targets, bias: Tensor | None = None
    ) -> None:
        for segment in batch.segments:
            rows = x[segment.start : segment.stop]
            for target in targets:
                row = segment.rows.get((layer, target.module_id))
                if row is None:
                    continue
                columns = slice(target.start, target.start + target.width)
                a, b, magnitude = _matrices(batch.pool, row, x, target.width)
                out = y[segment.start : segment.stop, columns]
                low = rows @ a.T
                out.addmm_(low if row.format.scale == 1 else low * row.format.scale, b)
                if magnitude is not None:
                    shift = bias[columns] if bias is not None else 0
                    out.copy_((out - shift) * magnitude + shift)

    def rotate_and_store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rotary: Rotary | None,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
    ) -> Tensor:
        if rotary is not None:
            q, k = (self._rotate(x, *rotary) for x in (q, k))
        self.store_kv(k, v, k_cache, v_cache, batch)
        return q

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        size = cos.shape[1]
        if size == x.shape[2]:
            return self.rotary(x, cos, sin)
        return torch.cat((self.rotary(x[..., :size].contiguous(), cos, sin), x[..., size:]), dim=-1)

    def store_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch) -> None:
        """k_cache.view(-1, H, D)[slots] = k; the same for v."""
        for new, cache in ((k, k_cache), (v, v_cache)):
            rows = cache.view(-1, *new.shape[1:])
            if cache.dtype == FP8:  # as bytes, as few operations support it; clamped, as overflow becomes NaN
                new, rows = new.clamp(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8), rows.view(torch.uint8)
            rows.index_copy_(0, batch.slots, new)

    def attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, params: AttentionParams
    ) -> Tensor:
        out = torch.empty_like(q)
        for s, kv_len in enumerate(batch.kv_lens):
            rows = slice(batch.query_starts[s], batch.query_starts[s + 1])
            out[rows] = self.attend_one(q[rows], k_cache, v_cache, batch.block_table[s], kv_len, params)
        return out

    def attend_one(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        blocks: Tensor,
        kv_len: int,
        params: AttentionParams,
    ) -> Tensor:
        """One sequence, whose last n of kv_len tokens are the queries. q [n, Hq, D] -> [n, Hq, D].

        The G query heads of one key head become G * n rows, so keys are not repeated.
        """
        count, num_heads, dim = q.shape
        kv_heads = k_cache.shape[2]
        groups = num_heads // kv_heads
        k, v = (gather(cache, blocks, kv_len, q.dtype) for cache in (k_cache, v_cache))
        queries = (
            q.view(count, kv_heads, groups, dim).permute(1, 2, 0, 3).reshape(kv_heads, groups * count, dim)
        )
        keys = torch.arange(kv_len, device=q.device)
        last = torch.arange(kv_len - count, kv_len, device=q.device).unsqueeze(1)
        mask = keys <= last
        if params.window is not None:
            mask &= keys > last - params.window
        mixed = attend(queries.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), mask.repeat(groups, 1), params)
        return mixed.view(kv_heads, groups, count, dim).permute(2, 0, 1, 3).reshape(count, num_heads, dim)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (weight * normed.to(weight.dtype)).to(x.dtype)

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + delta
        return total, self.rms_norm(total, weight, eps)

    def gated(self, y: Tensor, activation: str) -> Tensor:
        up, gate = y.chunk(2, dim=-1)
        return ACTIVATIONS[activation](gate) * up

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return F.layer_norm(x, weight.shape, weight, bias, eps)

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x * cos + cat(-x2, x1) * sin, halves of the last dimension; x [T, H, D]; cos, sin [T, D]."""
        x1, x2 = x.chunk(2, dim=-1)
        return x * cos.unsqueeze(1) + torch.cat((-x2, x1), dim=-1) * sin.unsqueeze(1)

    def pair_up(
        self, choices: Tensor, num_experts: int, lora: LoraBatch | None
    ) -> tuple[ExpertPairs, Tensor]:
        return pair_up(choices, num_experts, lora)

    def expert_linear(self, x: Tensor, pairs: ExpertPairs, weights: Sequence[Weight]) -> Tensor:
        assert isinstance(pairs, HostPairs)
        runs = zip(pairs.starts, pairs.starts[1:], weights, strict=False)
        return torch.cat([self.linear(x[start:stop], w, None) for start, stop, w in runs if start < stop])

    def expert_lora_add(
        self, y: Tensor, x: Tensor, batch: LoraBatch, pairs: ExpertPairs, layer: int, targets: Targets
    ) -> None:
        assert isinstance(pairs, HostPairs)
        sized = [(target, x.shape[-1] + target.width) for target in targets]
        segments = group_segments(batch, pairs.groups, layer, sized)
        if segments:
            self.lora_add(y, x, LoraBatch(batch.pool, segments), layer, targets)


def gather(cache: Tensor, blocks: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """The keys or values of one sequence's first tokens, [Hkv, length, D]."""
    used = blocks[: -(-length // cache.shape[1])].long()
    return cache[used].to(dtype).flatten(0, 1)[:length].transpose(0, 1)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, params: AttentionParams) -> Tensor:
    """Masked softmax(scores) v over the last two dimensions. The mask includes the window."""
    scale, softcap = params.scale, params.softcap
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = softcap * torch.tanh(q @ k.transpose(-1, -2) * (scale / softcap))
    return torch.softmax(scores.float().masked_fill(~mask, float("-inf")), dim=-1).to(v.dtype) @ v


def _matrices(pool: Tensor, row: LoraRow, x: Tensor, out_dim: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """A, B and the DoRA magnitude of a row, in the dtype of x."""
    rank, sizes = row.format.rank, row.format.sizes(x.shape[-1], out_dim)
    numbers = as_encoded(pool, row.format.encoding)[row.offset : row.offset + sum(sizes)].to(x.dtype)
    a, b, magnitude = numbers.split(sizes)
    return a.view(rank, -1), b.view(rank, -1), magnitude if row.format.dora else None


def as_encoded(pool: Tensor, encoding: int) -> Tensor:
    """The pool as numbers of an `Encoding`."""
    return pool.view(FP8) if encoding == Encoding.FLOAT8 else pool
