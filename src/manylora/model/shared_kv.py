"""Attention of a layer without keys and values: it reads those stored by an earlier layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from manylora.config.model import ModelConfig
from manylora.kernels.reference import ReferenceOps
from manylora.kernels.spec import AttentionBatch, AttentionParams, LoraBatch
from manylora.model.layers import LoraLinear, Norm, Turns


@dataclass(frozen=True)
class SharedKvAttention:
    """Grouped-query attention over paged keys and values of another layer, which ran earlier in this step.

    q_norm: over head_dim, or None. rotary: index of the layer's rotation among the step's; -1: none.
    """

    config: ModelConfig
    ops: ReferenceOps
    q: LoraLinear
    out: LoraLinear
    q_norm: Norm | None
    params: AttentionParams
    rotary: int

    def __call__(
        self, x: Tensor, turns: Turns, batch: AttentionBatch, lora: LoraBatch | None, kv: Tensor
    ) -> Tensor:
        """x [T, hidden] -> [T, hidden]. kv: the other layer's part of the cache."""
        rows, config = x.shape[0], self.config
        q = self.q(x, lora).view(rows, config.num_heads, config.head_dim)
        if self.q_norm is not None:
            q = self.q_norm(q, lora)
        if turns.rotary is not None:
            q = self.ops.rotate_queries(q, turns.rotary)
        mixed = self.ops.attention(q, kv[0], kv[1], batch, self.params)
        return self.out(mixed.reshape(rows, config.q_size), lora)
