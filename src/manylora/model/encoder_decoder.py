"""EncoderDecoder: an encoder for the whole prompt, and a decoder with cross-attention to its output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from manylora.adapters.modules import LoraModuleId
from manylora.config.model import ModelConfig
from manylora.kernels.panels import Panels
from manylora.kernels.reference import ReferenceOps
from manylora.kernels.spec import AttentionParams, LoraBatch, LoraTarget
from manylora.model.attend import PagedGroup, RelativeBias, attend_groups, attend_spans, paged_groups
from manylora.model.batch import ForwardBatch, KvTensors
from manylora.model.extras import adapt_head
from manylora.model.families import FAMILIES
from manylora.model.layers import LoraLinear, Mlp, Norm
from manylora.model.transformer import Transformer

IMPOSSIBLE = -1e30  # a logit; finite, because the engine treats infinite logits as a fault

Mix = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention without its projections: q, k, v [T, H, D] -> [T, H, D]."""


@dataclass(frozen=True)
class SelfAttention:
    config: ModelConfig
    qkv: LoraLinear
    out: LoraLinear

    def __call__(self, x: Tensor, lora: LoraBatch | None, mix: Mix) -> Tensor:
        config = self.config
        sizes = (config.q_size, config.kv_size, config.kv_size)
        q, k, v = (part.unflatten(1, (-1, config.head_dim)) for part in self.qkv(x, lora).split(sizes, dim=1))
        return self.out(mix(q, k.contiguous(), v.contiguous()).flatten(1), lora)


@dataclass(frozen=True)
class _CrossAttention:
    """Queries from the decoder over paged keys and values of the encoder's output."""

    config: ModelConfig
    q: LoraLinear
    kv: LoraLinear
    out: LoraLinear

    def store_kv(self, encoded: Tensor, batch: ForwardBatch, kv: Tensor, ops: ReferenceOps) -> None:
        """Write keys and values of the encoder's output [T, hidden] to their pages."""
        k, v = self.kv(encoded, batch.lora).unflatten(1, (2, -1, self.config.head_dim)).unbind(1)
        k, v = k.contiguous(), v.contiguous()
        ops.rotate_and_store(k, k, v, None, kv[0], kv[1], batch.attention)  # k in place of queries: unused

    def __call__(
        self, x: Tensor, groups: Sequence[PagedGroup], lora: LoraBatch | None, kv: Tensor, scale: float
    ) -> Tensor:
        q = self.q(x, lora).unflatten(1, (-1, self.config.head_dim))
        return self.out(attend_groups(q, kv[0], kv[1], groups, scale).flatten(1), lora)


@dataclass(frozen=True)
class Layer:
    """cross, cross_norm: None in the encoder. post_norm: norms follow the residual additions."""

    post_norm: bool
    attention: SelfAttention
    cross: _CrossAttention | None
    mlp: Mlp
    attention_norm: Norm
    cross_norm: Norm | None
    mlp_norm: Norm

    def __call__(
        self, x: Tensor, lora: LoraBatch | None, mix: Mix, cross: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """cross: attention to the encoder's output."""
        x = self._add(x, self.attention_norm, lora, lambda x: self.attention(x, lora, mix))
        if cross is not None and self.cross_norm is not None:
            x = self._add(x, self.cross_norm, lora, cross)
        return self._add(x, self.mlp_norm, lora, lambda x: self.mlp(x, lora))

    def _add(self, x: Tensor, norm: Norm, lora: LoraBatch | None, part: Callable[[Tensor], Tensor]) -> Tensor:
        return norm(x + part(x), lora) if self.post_norm else x + part(norm(x, lora))


@dataclass(frozen=True)
class Stack:
    """An encoder or a decoder: its layers and what surrounds them. name: `encoder` or `decoder`, the prefix
    of our weights and of extras. bias: on attention scores by relative position, as in T5.
    """

    name: str
    layers: tuple[Layer, ...]
    embedding: Tensor | Panels
    positions: Tensor | None
    embedding_norm: Norm | None
    norm: Norm | None
    bias: RelativeBias | None


class EncoderDecoder(Transformer):
    """Layers are numbered through both stacks, the encoder's first, also in adapters. max_seq_len: the
    longest sequence that will be run; None: what the model allows.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Any],
        dtype: torch.dtype,
        ops: ReferenceOps,
        max_seq_len: int | None = None,
    ) -> None:
        super().__init__(config, weights, dtype, ops)
        assert config.encoder is not None
        self._encoder_config = config.encoder
        self._longest = max_seq_len or config.max_position_embeddings
        if self._head_bias is not None:
            self._head_bias = self._head_bias.flatten()  # the checkpoint has [1, vocab]
        self._params = AttentionParams(self._attention_scale)
        dim, self._encoder_scale = self._encoder_config.head_dim, self._attention_scale
        self._of_encoder = config
        if dim:
            heads, self._encoder_scale = config.q_size // dim, dim**-0.5
            self._of_encoder = replace(config, num_heads=heads, num_kv_heads=heads, head_dim=dim)
        family = FAMILIES[config.architecture]
        assert family.encoder is not None
        self._names = (family.encoder(config), family.names(config))
        count = config.encoder.num_layers
        self._encoder = self._stack("encoder", range(count))
        self._decoder = self._stack("decoder", range(count, config.num_layers))

    @torch.inference_mode()
    def encode(self, batch: ForwardBatch, kv: KvTensors) -> None:
        """Run the encoder on whole prompts; write cross-attention's keys and values to kv, at the slots."""
        starts, stack = batch.attention.query_starts, self._encoder
        bias = None
        if stack.bias is not None:
            places = torch.arange(max(batch.attention.kv_lens), device=self._device)
            bias = stack.bias(places - places.unsqueeze(1)).to(self.dtype)

        def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend_spans(q, k, v, starts, self._encoder_scale, bias)

        x = self._enter(batch, stack)
        for layer in stack.layers:
            x = layer(x, batch.lora, mix)
        x = self._encoded(x, batch)
        for number, layer in enumerate(self._decoder.layers):
            assert layer.cross is not None
            layer.cross.store_kv(x, batch, kv[number], self._ops)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: KvTensors) -> Tensor:
        """Logits [L, vocab] float32 of `batch.logits_rows`. Writes the decoder's keys and values to kv."""
        assert batch.cross is not None
        stack, size = self._decoder, kv[0].shape[2]
        cross_groups = paged_groups(batch.cross, size, self.dtype)
        groups: list[PagedGroup] = []
        if stack.bias is not None:
            groups = paged_groups(batch.attention, size, self.dtype, stack.bias, causal=True)
        x = self._enter(batch, stack)
        for layer, pages in zip(stack.layers, kv, strict=True):
            assert layer.cross is not None
            mix = partial(self._mix, batch=batch, kv=pages, groups=groups)
            scale, lora = self._attention_scale, batch.lora
            cross = partial(layer.cross, groups=cross_groups, lora=lora, kv=pages, scale=scale)
            x = layer(x, lora, mix, cross)
        return self._logits(x, batch)

    def _encoded(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """The input of cross-attention, from the output of the encoder's last layer."""
        norm = self._encoder.norm
        return x if norm is None else norm(x, batch.lora)

    def _logits(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        norm, rows, lora = self._decoder.norm, batch.logits_rows, batch.lora
        x = (x if norm is None else norm(x, lora))[rows]
        if self.config.logits_scale != 1:  # before the head: an adapter's bias on the head is not scaled
            x = x * self.config.logits_scale
        logits = self._head_rows(x, None)
        if logits is None:
            return torch.empty((0, self.config.vocab_size), device=self._device)
        if self._head_bias is not None:
            logits += self._head_bias.float()
        if lora is not None and lora.extras:
            adapt_head(logits, x, lora.extras, self._head_bias, tied=True)
        forced = self._encoder_config.forced_bos_id
        if forced is not None:  # only this can follow a decoder prompt of one token
            first = batch.positions[rows] == 0
            logits[first] = IMPOSSIBLE
            logits[first, forced] = 0
        return logits

    def _mix(
        self, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch, kv: Tensor, groups: Sequence[PagedGroup]
    ) -> Tensor:
        """In the decoder. groups: with a bias on the scores; empty: without one."""
        q = self._ops.rotate_and_store(q.contiguous(), k, v, None, kv[0], kv[1], batch.attention)
        if groups:
            return attend_groups(q, kv[0], kv[1], groups, self._attention_scale)
        return self._ops.attention(q, kv[0], kv[1], batch.attention, self._params)

    def _enter(self, batch: ForwardBatch, stack: Stack) -> Tensor:
        x = self._embed_tokens(batch, stack.embedding, f"{stack.name}.embed")
        if stack.positions is not None:
            x = x + F.embedding(batch.positions, stack.positions)
        return x if stack.embedding_norm is None else stack.embedding_norm(x, batch.lora)

    def _stack(self, name: str, numbers: range) -> Stack:
        bias, encodes = None, name == "encoder"
        if self._encoder_config.relative_buckets:
            distance = self._encoder_config.relative_max_distance
            bias = RelativeBias(self._weights[f"{name}.relative"], distance, self._longest, both_ways=encodes)
        return Stack(
            name=name,
            layers=tuple(self._layer(number, crosses=not encodes) for number in numbers),
            embedding=self._weights.get(f"{name}.embed", self._weights["embed"]),
            positions=self._weights.get(f"{name}.positions"),
            embedding_norm=self._norm(f"{name}.embedding_norm", f"{name}.embedding_norm"),
            norm=self._norm(f"{name}.norm", f"{name}.norm"),
            bias=bias,
        )

    def _layer(self, number: int, crosses: bool) -> Layer:
        names = self._names[crosses].block_norms
        attention_norm, cross_norm, mlp_norm = (
            self._inner_norm(number, part, names.get(part))
            for part in ("attention_norm", "cross_norm", "mlp_norm")
        )
        assert attention_norm is not None and mlp_norm is not None
        cross, config, out = None, self.config, self._one(number, "out", LoraModuleId.ATTN_DENSE)
        if crosses:
            k = LoraTarget(LoraModuleId.CROSS_ATTN_K, 0, config.kv_size)
            v = LoraTarget(LoraModuleId.CROSS_ATTN_V, config.kv_size, config.kv_size)
            cross = _CrossAttention(
                config,
                self._one(number, "cross_q", LoraModuleId.CROSS_ATTN_Q, config.q_size),
                self._linear(number, "cross_kv", k, v),
                self._one(number, "cross_out", LoraModuleId.CROSS_ATTN_DENSE),
            )
        return Layer(
            self._encoder_config.post_norm,
            SelfAttention(config if crosses else self._of_encoder, self._qkv(number), out),
            cross,
            self._mlp(number),
            attention_norm,
            cross_norm,
            mlp_norm,
        )
