"""Attention over latent keys and values (MLA), as in DeepSeek V2 and V3.

The cache has one vector per token for all heads: a rotated key, and the latent from which kv_b_proj computes
the rest of each head's key, and its value. Those are never computed. With W_k and W_v as a head's rows of
kv_b_proj, q_i . (W_k c_j) = (q_i W_k) . c_j, and the sum of p_j W_v c_j is W_v times the sum of p_j c_j.
Queries are therefore projected to latents, attention has one key head of `cached_dim` elements, and its
output is projected to values.

An adapter on kv_b_proj adds B A to W_k and W_v. All tokens of a sequence have the same adapter, so its
products involve only the step's rows: r * heads * (head + kv_rank) multiplications each, whatever the length
of the sequence. Computing keys and values would add B A c_j for every token in the cache, in every step.

The price is that scores and sums have `cached_dim` elements (576 in DeepSeek) instead of a head's 192 and
128, which makes prompts slower. Decoding reads the cache, which is many times smaller this way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from manylora.adapters.modules import MODULE_NAMES, LoraModuleId
from manylora.config.blocks import LatentConfig
from manylora.kernels.lora import matrices
from manylora.kernels.reference import ReferenceOps, rotate
from manylora.kernels.spec import AttentionBatch, AttentionParams, LoraBatch
from manylora.model.layers import LoraLinear, Norm, Rotation, halves_first

KV_B = LoraModuleId.ATTN_KV_B


@dataclass(frozen=True)
class _Adapted:
    """Rows with one adapter. A [r, kv_rank]; B transposed, magnitude [H, plain + value] or None."""

    rows: slice
    a: Tensor
    b: Tensor
    magnitude: Tensor | None


@dataclass(frozen=True)
class Expansion:
    """kv_b_proj [H, plain_dim + value_dim, kv_rank], from latents to each head's keys and values."""

    layer: int
    weight: Tensor
    plain_dim: int

    def of_queries(self, q: Tensor, lora: LoraBatch | None) -> Tensor:
        """q [T, H, plain_dim] -> [T, H, kv_rank]: q_i W_k, including each row's adapter."""
        adapted = list(self._adapted(q, lora))
        scaled = [one for one in adapted if one.magnitude is not None]
        q = q.clone() if scaled else q
        for one in scaled:
            assert one.magnitude is not None
            q[one.rows] *= one.magnitude[:, : self.plain_dim]
        y = _by_head(q, self.weight[:, : self.plain_dim])
        for one in adapted:
            low = torch.einsum("thd,rhd->thr", q[one.rows], one.b[..., : self.plain_dim])
            y[one.rows] += low @ one.a
        return y

    def of_sums(self, mixed: Tensor, lora: LoraBatch | None) -> Tensor:
        """mixed [T, H, kv_rank] -> [T, H, value_dim]: W_v times the sums, including each row's adapter."""
        y = _by_head(mixed, self.weight[:, self.plain_dim :].transpose(1, 2))
        for one in self._adapted(mixed, lora):
            low = mixed[one.rows] @ one.a.T
            y[one.rows] += torch.einsum("thr,rhd->thd", low, one.b[..., self.plain_dim :])
            if one.magnitude is not None:
                y[one.rows] *= one.magnitude[:, self.plain_dim :]
        # Trained biases. That of keys adds the same to all scores of a query, which has no effect.
        name = f"layers.{self.layer}.{MODULE_NAMES[KV_B]}.bias"
        for segment in lora.extras if lora is not None else ():
            bias = segment.values.get(name)
            if bias is not None:
                values = bias.vector(y.dtype).view(self.weight.shape[:2])[:, self.plain_dim :]
                y[segment.start : segment.stop] += values
        return y

    def _adapted(self, x: Tensor, lora: LoraBatch | None) -> Iterator[_Adapted]:
        if lora is None:
            return
        heads, width, rank = self.weight.shape
        for segment in lora.segments:
            first = segment.rows.get((self.layer, KV_B))
            rows = slice(segment.start, segment.stop)
            for row in first.members if first is not None else ():
                a, b, magnitude = matrices(lora.pool, row, rank, heads * width, x.dtype)
                if row.format.scale != 1:
                    a = a * row.format.scale
                m = None if magnitude is None else magnitude.view(heads, width)
                yield _Adapted(rows, a, b.view(-1, heads, width), m)


@dataclass(frozen=True)
class LatentAttention:
    """qkv: fused q_proj or q_a_proj, and kv_a_proj_with_mqa. q_up: q_b_proj. pairs: neighbours rotate."""

    sizes: LatentConfig
    heads: int
    ops: ReferenceOps
    qkv: LoraLinear
    q_up: LoraLinear | None
    q_norm: Norm | None
    kv_norm: Norm
    expansion: Expansion
    out: LoraLinear
    params: AttentionParams
    pairs: bool
    rotary: int = 0

    def __call__(
        self,
        x: Tensor,
        rotation: Rotation,
        batch: AttentionBatch,
        lora: LoraBatch | None,
        kv: Tensor,
    ) -> Tensor:
        """kv [1, blocks, tokens_per_block, 1, cached_dim]."""
        assert rotation.rotary is not None
        sizes, rows = self.sizes, x.shape[0]
        first = sizes.q_rank or self.heads * sizes.query_dim
        q, latent, turned = self.qkv(x, lora).split((first, sizes.kv_rank, sizes.rope_dim), dim=-1)
        if self.q_up is not None:
            assert self.q_norm is not None
            q = self.q_up(self.q_norm(q, lora), lora)
        plain, q = q.reshape(rows, self.heads, -1).split((sizes.plain_dim, sizes.rope_dim), dim=-1)
        k = torch.cat(
            (self._rotated(turned.unsqueeze(1), rotation), self.kv_norm(latent, lora)[:, None]), dim=-1
        )
        cache = kv[0]
        self.ops.rotate_and_store(k, k, k, None, cache, cache, batch)  # one vector, passed as key and value
        q = torch.cat((self._rotated(q, rotation), self.expansion.of_queries(plain, lora)), dim=-1)
        mixed = self.ops.attention(q, cache, cache, batch, self.params)[..., sizes.rope_dim :]
        values = self.expansion.of_sums(mixed, lora)
        return self.out(values.reshape(rows, -1), lora)

    def _rotated(self, x: Tensor, rotation: Rotation) -> Tensor:
        assert rotation.rotary is not None
        return rotate(halves_first(x, self.sizes.rope_dim) if self.pairs else x, *rotation.rotary)


def _by_head(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, H, K], weight [H, K, N] -> [T, H, N], contiguous."""
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1).contiguous()
