"""The layers of a decoder. The linear layer carries the adapters; no layer knows a device or a rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from manylora.config import ModelConfig
from manylora.kernels.spec import AttentionBatch, LoraBatch, LoraTarget, Ops

__all__ = ["Attention", "Block", "LoraLinear", "Mlp"]


@dataclass(frozen=True)
class LoraLinear:
    """y = x W^T + bias, plus each row's own adapter.

    weight: [N, K] as `ops.pack` made it; targets say which LoRA modules add to which of the N columns.
    """

    ops: Ops
    layer: int
    weight: Tensor
    bias: Tensor | None
    targets: tuple[LoraTarget, ...]

    def __call__(self, x: Tensor, lora: LoraBatch | None) -> Tensor:
        y = self.ops.linear(x, self.weight, self.bias)
        if lora is not None:
            self.ops.lora_add(y, x, lora, self.layer, self.targets, self.bias)
        return y


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention over paged keys and values. q_norm, k_norm [head_dim] or None."""

    config: ModelConfig
    ops: Ops
    qkv: LoraLinear
    out: LoraLinear
    q_norm: Tensor | None
    k_norm: Tensor | None
    window: int | None

    def __call__(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        batch: AttentionBatch,
        lora: LoraBatch | None,
        kv: Tensor,
    ) -> Tensor:
        config, ops, rows = self.config, self.ops, x.shape[0]
        q, k, v = self.qkv(x, lora).split((config.q_size, config.kv_size, config.kv_size), dim=-1)
        q = q.reshape(rows, config.num_heads, config.head_dim)
        k = k.reshape(rows, config.num_kv_heads, config.head_dim)
        v = v.reshape(rows, config.num_kv_heads, config.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q = ops.rms_norm(q, self.q_norm, config.rms_norm_eps)
            k = ops.rms_norm(k, self.k_norm, config.rms_norm_eps)
        q, k = ops.rotary(q, *rotary), ops.rotary(k, *rotary)
        ops.store_kv(k, v, kv[0], kv[1], batch)
        mixed = ops.attention(q, kv[0], kv[1], batch, config.head_dim**-0.5, self.window)
        return self.out(mixed.reshape(rows, config.q_size), lora)


@dataclass(frozen=True)
class Mlp:
    """down(silu(gate x) * up x). The fused weight's rows are [up; gate]."""

    up_gate: LoraLinear
    down: LoraLinear

    def __call__(self, x: Tensor, lora: LoraBatch | None) -> Tensor:
        up, gate = self.up_gate(x, lora).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up, lora)


@dataclass(frozen=True)
class Block:
    """One pre-norm decoder layer."""

    config: ModelConfig
    ops: Ops
    attention_norm: Tensor
    attention: Attention
    mlp_norm: Tensor
    mlp: Mlp

    def __call__(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        batch: AttentionBatch,
        lora: LoraBatch | None,
        kv: Tensor,
    ) -> Tensor:
        eps = self.config.rms_norm_eps
        x = x + self.attention(self.ops.rms_norm(x, self.attention_norm, eps), rotary, batch, lora, kv)
        return x + self.mlp(self.ops.rms_norm(x, self.mlp_norm, eps), lora)
