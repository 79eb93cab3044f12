"""Decoder: one dense transformer for every supported family; the families differ in their ModelConfig."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from manylora.config import ModelConfig
from manylora.kernels.spec import LoraTarget, Ops
from manylora.model.batch import ForwardBatch
from manylora.model.layers import Attention, Block, LoraLinear, Mlp
from manylora.model.rope import rope_frequencies

__all__ = ["Decoder"]

# LoRA module ids of TensorRT-LLM.
ATTN_QKV, ATTN_Q, ATTN_K, ATTN_V, ATTN_DENSE = 0, 1, 2, 3, 4
MLP_H_TO_4H, MLP_4H_TO_H, MLP_GATE, MLP_GATE_UP = 5, 6, 7, 18


class Decoder:
    """weights: our names to tensors on one device, in one dtype, as `model.weights` makes them."""

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor], ops: Ops) -> None:
        self.config = config
        self._embedding = weights["embed"]
        self._head = weights["head"]
        self._norm = weights["norm"]
        self._ops = ops
        self._blocks = [_block(config, weights, ops, layer) for layer in range(config.num_layers)]
        frequencies, self._rotary_factor = rope_frequencies(config)
        self._frequencies = frequencies.to(self._embedding.device)

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.dtype

    @property
    def weight_bytes(self) -> int:
        tensors = [self._embedding, self._norm]
        if self._head is not self._embedding:
            tensors.append(self._head)
        for b in self._blocks:
            tensors += [b.attention_norm, b.mlp_norm]
            for linear in (b.attention.qkv, b.attention.out, b.mlp.up_gate, b.mlp.down):
                tensors += [t for t in (linear.weight, linear.bias) if t is not None]
        return sum(t.numel() * t.element_size() for t in tensors)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: Tensor) -> Tensor:
        """Logits [L, vocab] float32 of `batch.logits_rows`; writes keys and values into kv.

        kv [num_layers, 2, num_blocks, tokens_per_block, num_kv_heads, head_dim].
        """
        x = F.embedding(batch.input_ids, self._embedding)
        if batch.embeddings is not None:
            rows, vectors = batch.embeddings
            x[rows] = vectors
        rotary = self._rotary(batch.positions)
        for layer, block in enumerate(self._blocks):
            x = block(x, rotary, batch.attention, batch.lora, kv[layer])
        x = self._ops.rms_norm(x[batch.logits_rows], self._norm, self.config.rms_norm_eps)
        return self._ops.linear(x, self._head, None).float()

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, head_dim] in the compute dtype; angles in float32."""
        angles = positions.float().unsqueeze(1) * self._frequencies
        angles = torch.cat((angles, angles), dim=-1)
        factor = self._rotary_factor
        return (angles.cos() * factor).to(self.dtype), (angles.sin() * factor).to(self.dtype)


def _block(config: ModelConfig, weights: dict[str, Tensor], ops: Ops, layer: int) -> Block:
    def get(name: str) -> Tensor | None:
        return weights.get(f"{layer}.{name}")

    def linear(name: str, *targets: LoraTarget) -> LoraLinear:
        return LoraLinear(ops, layer, weights[f"{layer}.{name}.weight"], get(f"{name}.bias"), targets)

    q, kv, inner, hidden = config.q_size, config.kv_size, config.intermediate_size, config.hidden_size
    attention = Attention(
        config,
        ops,
        qkv=linear(
            "qkv",
            LoraTarget(ATTN_QKV, 0, q + 2 * kv),
            LoraTarget(ATTN_Q, 0, q),
            LoraTarget(ATTN_K, q, kv),
            LoraTarget(ATTN_V, q + kv, kv),
        ),
        out=linear("out", LoraTarget(ATTN_DENSE, 0, hidden)),
        q_norm=get("q_norm"),
        k_norm=get("k_norm"),
        window=config.sliding_windows[layer] if config.sliding_windows else None,
    )
    mlp = Mlp(
        up_gate=linear(
            "up_gate",
            LoraTarget(MLP_GATE_UP, 0, 2 * inner),
            LoraTarget(MLP_GATE, 0, inner),
            LoraTarget(MLP_H_TO_4H, inner, inner),
        ),
        down=linear("down", LoraTarget(MLP_4H_TO_H, 0, hidden)),
    )
    norms = weights[f"{layer}.attention_norm"], weights[f"{layer}.mlp_norm"]
    return Block(config, ops, norms[0], attention, norms[1], mlp)
