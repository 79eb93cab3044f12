"""RankDecoder: a Decoder of one rank's weights, with what it exchanges with others put around its layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from manylora.config.engine import ModelConfig, MoeConfig
from manylora.kernels.reference import ReferenceOps
from manylora.kernels.spec import LoraBatch
from manylora.model.batch import ForwardBatch, HiddenRows
from manylora.model.decoder import Decoder
from manylora.model.layers import Attends, Attention, FeedForward, Norm
from manylora.model.moe import Moe
from manylora.model.routing import Router
from manylora.parallel.collectives import Collectives
from manylora.parallel.experts import MoePart
from manylora.parallel.layers import SharedLayers, SharedNorm, SummedMlp
from manylora.parallel.mapping import Mapping


class RankDecoder(SharedLayers, Decoder):
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
        self._share(model, mapping, collectives)
        self._quantised_experts = False
        super().__init__(config, weights, dtype, ops)
        self._decode_step = None  # as that is one call from the first layer to the last
        if model.moe is not None:  # of any stage, as they decide what adapters may have
            self._quantised_experts = not collectives.least(not super().has_quantised_experts)

    @property
    def has_quantised_experts(self) -> bool:
        return self._quantised_experts

    def _router(self, layer: int, moe: MoeConfig) -> Router:
        """It chooses among the experts of all ranks."""
        return super()._router(layer, self._model.moe or moe)

    def _moe(self, layer: int, moe: MoeConfig) -> Moe:
        part, whole = super()._moe(layer, moe), self._model.moe
        if self._mapping.moe_ep_size == 1 or whole is None:
            return part
        fields = {name: getattr(part, name) for name in Moe.__dataclass_fields__}
        return MoePart(**fields, first=self._mapping.experts(whole.num_experts).start)

    def _feed_forward(self, layer: int) -> FeedForward:
        mlp = super()._feed_forward(layer)
        if self._mapping.tp_size == 1 or not isinstance(mlp, Moe):
            return mlp
        return SummedMlp(mlp, self._collectives.sum)

    def _attention(self, layer: int) -> Attends:
        attention = super()._attention(layer)
        if self.config.qk_norm != "all" or self._mapping.tp_size == 1 or not isinstance(attention, Attention):
            return attention
        return replace(
            attention,
            q_norm=self._shared(attention.q_norm, self._model.num_heads, self.config.num_heads),
            k_norm=self._shared(attention.k_norm, self._model.num_kv_heads, self.config.num_kv_heads),
        )

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

    def _pool(self, x: Tensor, delta: Tensor | None, pooled: HiddenRows, lora: LoraBatch | None) -> None:
        """Of several stages, `_logits` brings them to rank 0, behind the hidden states."""
        if self._mapping.rank == 0 and self._mapping.pp_size == 1:
            super()._pool(x, delta, pooled, lora)

    def _wanted(self, batch: ForwardBatch) -> None:
        """Other stages read all rows."""

    def _logits(self, x: Tensor, delta: Tensor | None, batch: ForwardBatch) -> Tensor:
        mapping, collectives, config = self._mapping, self._collectives, self.config
        if mapping.pp_size == 1:
            return super()._logits(x, delta, batch)
        assert delta is not None, "a stage has a block"
        pooled, nothing = batch.pooled, torch.empty((0, config.vocab_size), device=self._device)
        if mapping.is_last_stage:
            logits = super()._logits(x, delta, batch)
            if mapping.tp_rank == 0 and len(logits):
                collectives.send_back(logits)
            if mapping.tp_rank == 0 and pooled is not None:
                collectives.send_back(self._hidden(x, delta, pooled.rows, batch.lora))
            return nothing
        collectives.send_hidden(x + delta)
        if mapping.rank:
            return nothing
        count, where = len(batch.logits_rows), self._device
        logits = torch.empty((count, config.vocab_size), device=where)
        logits = collectives.receive_back(logits) if count else nothing
        if pooled is not None:
            shape = len(pooled.rows), config.hidden_size
            pooled.hidden = collectives.receive_back(torch.empty(shape, dtype=self.dtype, device=where))
        return logits
