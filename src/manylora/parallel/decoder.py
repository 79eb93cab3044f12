"""RankDecoder: a Decoder of one rank's weights, with what it exchanges with others put around its layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from manylora.config.engine import ModelConfig, MoeConfig
from manylora.kernels.reference import ReferenceOps
from manylora.kernels.spec import AttentionBatch, LoraBatch, LoraTarget
from manylora.lora.modules import LoraModuleId
from manylora.model.batch import ForwardBatch
from manylora.model.decoder import Decoder
from manylora.model.extras import adapt_head
from manylora.model.layers import Attends, Attention, Block, Norm, Turns
from manylora.model.moe import Moe
from manylora.parallel.collectives import Collectives
from manylora.parallel.experts import MoePart
from manylora.parallel.mapping import Mapping


@dataclass(frozen=True)
class SummedAttention:
    """Attention over some heads, whose output is a part of a sum."""

    attention: Attends
    add_up: Callable[[Tensor], Tensor]

    @property
    def rotary(self) -> int:
        return self.attention.rotary

    def __call__(
        self, x: Tensor, turns: Turns, batch: AttentionBatch, lora: LoraBatch | None, kv: Tensor
    ) -> Tensor:
        return self.add_up(self.attention(x, turns, batch, lora, kv))


@dataclass(frozen=True)
class SummedMlp:
    """An MLP or a mixture of experts with a part of its width, or of its experts."""

    mlp: Callable[[Tensor, LoraBatch | None], Tensor]
    add_up: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor, lora: LoraBatch | None) -> Tensor:
        return self.add_up(self.mlp(x, lora))


@dataclass(frozen=True)
class SharedNorm(Norm):
    """RMSNorm over all heads at once, of which this rank has some.

    share: of the heads that the ranks have together, those that count: less than 1 where several ranks have
    the same ones. total: elements of the whole.
    """

    add_up: Callable[[Tensor], Tensor] = lambda x: x
    share: float = 1.0
    total: int = 0

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        squares = self.add_up(wide.square().sum(-1, keepdim=True)) * self.share
        normed = wide * torch.rsqrt(squares / self.total + self.eps)
        return (weight * normed.to(weight.dtype)).to(x.dtype)


class RankDecoder(Decoder):
    """config: as `rank_config` makes it. model: the whole one's. weights: as `rank_plan` has them, with empty
    ones for the embedding and the head of stages that have none.

    `forward` returns logits on rank 0, and [0, vocab] on others.
    """

    def __init__(
        self,
        config: ModelConfig,
        model: ModelConfig,
        weights: dict[str, Any],
        dtype: torch.dtype,
        ops: ReferenceOps,
        mapping: Mapping,
        collectives: Collectives,
    ) -> None:
        self._model, self._mapping, self._collectives = model, mapping, collectives
        self._quantised_experts = False
        super().__init__(config, weights, dtype, ops)
        self._decode_step = None  # as that is one call from the first layer to the last
        if model.moe is not None:  # of any stage, as they decide what adapters may have
            self._quantised_experts = not collectives.least(not super().has_quantised_experts)
        tokens = mapping.vocabulary(model.vocab_size)
        self._tokens = tokens
        self._whole_bias = self._head_bias
        if self._head_bias is not None:
            self._head_bias = self._head_bias[tokens.start : tokens.stop].contiguous()
        if mapping.tp_size > 1:
            self._blocks = [self._summed(block) for block in self._blocks if isinstance(block, Block)]

    @property
    def has_quantised_experts(self) -> bool:
        return self._quantised_experts

    def _moe(self, layer: int, moe: MoeConfig) -> Moe:
        part, whole = super()._moe(layer, moe), self._model.moe
        if self._mapping.moe_ep_size == 1 or whole is None:
            return part
        count = whole.num_experts
        fields = {name: getattr(part, name) for name in Moe.__dataclass_fields__}
        fields["router"] = self._linear(layer, "router", LoraTarget(LoraModuleId.MOE_ROUTER, 0, count))
        return MoePart(**fields, first=self._mapping.experts(count).start)

    def _summed(self, block: Block) -> Block:
        add_up = self._collectives.sum
        attention = block.attention
        assert attention is not None and block.mlp is not None, "ranks share no recurrent layers"
        if self.config.qk_norm == "all" and isinstance(attention, Attention):
            attention = replace(
                attention,
                q_norm=self._shared(attention.q_norm, self._model.num_heads, self.config.num_heads),
                k_norm=self._shared(attention.k_norm, self._model.num_kv_heads, self.config.num_kv_heads),
            )
        summed = SummedAttention(attention, add_up)
        return replace(block, attention=summed, mlp=SummedMlp(block.mlp, add_up))

    def _shared(self, norm: Norm | None, heads: int, local: int) -> SharedNorm:
        assert norm is not None
        share = heads / (local * self._mapping.tp_size)
        fields = {name: getattr(norm, name) for name in Norm.__dataclass_fields__}
        total = heads * self.config.head_dim
        return SharedNorm(**fields, add_up=self._collectives.sum, share=share, total=total)

    def _embed(self, batch: ForwardBatch) -> Tensor:
        if self._mapping.is_first_stage:
            return super()._embed(batch)
        shape = (len(batch.input_ids), self.config.hidden_size)
        return self._collectives.receive_hidden(torch.empty(shape, dtype=self.dtype, device=self._device))

    def _look_up(self, ids: Tensor, table: Tensor) -> Tensor:
        """Each token's row is with one rank; the others add zeros."""
        if self._mapping.tp_size == 1:
            return super()._look_up(ids, table)
        own = ids - self._tokens.start
        mine = (own >= 0) & (own < len(self._tokens))
        x = F.embedding(own.where(mine, 0), table).to(self.dtype)
        return self._collectives.sum(x.where(mine.unsqueeze(1), 0))

    def _wanted(self, batch: ForwardBatch) -> None:
        """Other stages read all rows."""

    def _logits(self, x: Tensor, delta: Tensor | None, batch: ForwardBatch) -> Tensor:
        mapping, collectives = self._mapping, self._collectives
        assert delta is not None, "a stage has a block"
        count, vocab = len(batch.logits_rows), self.config.vocab_size
        nothing = torch.empty((0, vocab), device=self._device)
        if not mapping.is_last_stage:
            collectives.send_hidden(x + delta)
        logits = self._head_logits(x, delta, batch) if mapping.is_last_stage and count else None
        if mapping.pp_size > 1 and count:
            if logits is not None:
                collectives.send_logits(logits)
                logits = None
            if mapping.rank == 0:
                return collectives.receive_logits(torch.empty((count, vocab), device=self._device))
        return nothing if logits is None else logits

    def _head_logits(self, x: Tensor, delta: Tensor, batch: ForwardBatch) -> Tensor | None:
        """[L, vocab] on the first rank of the last stage, None on others."""
        rows, lora = batch.logits_rows, batch.lora
        extras = () if lora is None else lora.extras
        x = self._hidden(x, delta, rows, lora)
        logits = self._ops.linear(x, self._head, self._head_bias).float()
        # Every part as wide as the first, which is the widest.
        widest = len(self._mapping.at(0).vocabulary(self.config.vocab_size))
        parts = self._collectives.gather(F.pad(logits, (0, widest - logits.shape[1])))
        if parts is None:
            return None
        sizes = [len(self._mapping.at(rank).vocabulary(self.config.vocab_size)) for rank in range(len(parts))]
        logits = torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], dim=1)
        if lora is not None and extras:
            adapt_head(logits, x, extras, self._whole_bias, self.config.tie_word_embeddings)
        return logits
