"""Models with one rank's weights, with communication added around their layers: RankDecoder and
RankEncoderDecoder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from manylora.config.blocks import LayerInputsConfig, Mamba2Config
from manylora.config.model import ModelConfig, MoeConfig
from manylora.kernels.experts import HostPairs
from manylora.kernels.reference import ReferenceOps
from manylora.kernels.spec import LoraBatch
from manylora.model.batch import ForwardBatch, HiddenRows, KvTensors
from manylora.model.decoder import Decoder, ids_of
from manylora.model.encoder_decoder import EncoderDecoder, Stack
from manylora.model.layer_inputs import LayerInputs
from manylora.model.layers import Attends, Attention, FeedForward, Norm
from manylora.model.moe import ExpertsBesideMlp, Moe, Router, in_pairs
from manylora.model.recurrent import LayerState, Mamba2
from manylora.parallel.adapters import kv_for_next, kv_from_before
from manylora.parallel.collectives import Collectives
from manylora.parallel.layers import SharedLayers, SharedNorm, SummedMlp, extended, look_up_shared
from manylora.parallel.mapping import Mapping


@dataclass(frozen=True)
class MoePart(Moe):
    """As `Moe`, with experts [first, first + config.num_experts) of those among which the router chooses. The
    other experts contribute 0, so that the ranks' results can be summed.
    """

    first: int = 0

    def each(
        self, x: Tensor, choices: Tensor, lora: LoraBatch | None, weights: Tensor | None = None
    ) -> Tensor:
        count, ops = self.config.num_experts, self.up_gate.ops
        own = choices - self.first
        mine = (own >= 0) & (own < count)
        # Choices of other ranks' experts are mapped to one additional expert after ours.
        pairs, places = ops.pair_up(own.where(mine, count), count + 1, lora)
        if not isinstance(pairs, HostPairs):
            # A device that does not report the number of pairs to the host computes all of them.
            y = super().each(x, own.where(mine, choices % count), lora, weights)
            return y.where(mine.unsqueeze(-1), 0)
        used = pairs.starts[count]
        y = torch.zeros((len(places), x.shape[1]), dtype=x.dtype, device=x.device)
        if used:
            groups = pairs.groups[pairs.groups[:, 2] < count]
            ours = type(pairs)(pairs.rows[:used], pairs.starts[: count + 1], groups)
            sizes, experts = in_pairs(weights, places), in_pairs(own, places) if self.config.biased else None
            first = (None if part is None else part[:used] for part in (experts, sizes))
            y[:used] = self.run(x, ours, next(first), lora, next(first))
        return y[places].view(*choices.shape, -1)


@dataclass(frozen=True)
class SharedMamba2(Mamba2):
    """A Mamba-2 layer on one rank, if heads that are normalised together are on several ranks.

    add_up: sums over the ranks of a stage, [T, groups]. group, groups: the group of this rank's heads, and
    the number of groups. total: values per group, over all its ranks.
    """

    add_up: Callable[[Tensor], Tensor] = lambda x: x
    group: int = 0
    groups: int = 1
    total: int = 0

    def _mixed(self, rows: Tensor, cache: LayerState) -> Tensor:
        own = self.weights
        assert own.norm is not None
        plain = self.ops.mamba2(rows, replace(own, norm_groups=0), cache.state, cache.batch).float()
        gate = F.silu(rows[:, : own.value_size].float())
        y = plain * gate if own.gate_first else plain
        squares = y.new_zeros(len(y), self.groups)
        squares[:, self.group] = y.square().sum(-1)
        mean = self.add_up(squares)[:, self.group, None] / self.total
        y = y * (mean + own.eps).rsqrt() * own.norm
        return (y if own.gate_first else y * gate).to(rows.dtype)


@dataclass(frozen=True)
class RankLayerInputs(LayerInputs):
    """The per-layer embeddings on one rank. The table has the columns of this stage's layers and the rows
    of `tokens`.

    The first stage computes the parts from embeddings for all layers, because only it has the embeddings
    and the adapters' rows of that matrix.
    """

    collectives: Collectives
    tokens: range

    def look_up(self, ids: Tensor) -> Tensor:
        if len(self.tokens) == self.config.vocab_size:
            return super().look_up(ids)
        return look_up_shared(ids, self.table, self.tokens, self.table.dtype, self.collectives)

    def of_stage(self, ids: Tensor, made: Tensor) -> Tensor:
        """made: for the layers of this stage and later ones, [T, layers, dim] -> [layers, T, dim]: those of
        this stage as blocks need them, the others unchanged.
        """
        count = self.table.shape[1] // self.config.dim
        own = self.add(ids, made[:, :count])
        return torch.cat((own, made[:, count:].transpose(0, 1)))


class RankDecoder(SharedLayers, Decoder):
    """`forward` returns logits on rank 0, and [0, vocab] on others."""

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
        self._quantised_experts = False
        super().__init__(config, model, weights, dtype, ops, mapping, collectives)
        self._decode_step = None  # because it is one call from the first layer to the last
        self._kv_received, self._kv_sent = kv_from_before(model, mapping), kv_for_next(model, mapping)
        self._passed_on: dict[int, Tensor] = {}  # keys and values by layer, within a step
        if model.moe is not None:  # on any stage, because they decide what adapters may have
            self._quantised_experts = not collectives.least(not super().has_quantised_experts)

    @property
    def has_quantised_experts(self) -> bool:
        return self._quantised_experts

    def _router(self, layer: int, moe: MoeConfig) -> Router:
        """The router chooses among the experts of all ranks."""
        return super()._router(layer, self._model.moe or moe)

    def _moe(self, layer: int, moe: MoeConfig) -> Moe:
        part, whole = super()._moe(layer, moe), self._model.moe
        if self._mapping.moe_ep_size == 1 or whole is None:
            return part
        return extended(MoePart, part, first=self._mapping.experts(whole.num_experts).start)

    def _feed_forward(self, layer: int) -> FeedForward:
        mlp = super()._feed_forward(layer)
        if self._mapping.tp_size == 1 or not isinstance(mlp, Moe):
            return mlp
        return SummedMlp(mlp, self._collectives.sum)

    def _beside(self, layer: int) -> ExpertsBesideMlp | None:
        found = super()._beside(layer)
        if self._mapping.tp_size == 1 or found is None:
            return found
        return replace(found, moe=SummedMlp(found.moe, self._collectives.sum))

    def _mamba2(self, layer: int, own: Mamba2Config) -> Mamba2:
        part, whole, tp = super()._mamba2(layer, own), self._model.recurrent, self._mapping.tp_size
        assert isinstance(whole, Mamba2Config)
        if tp == 1 or not own.normed or whole.groups % tp == 0:
            return part
        group = self._mapping.tp_rank * whole.groups // tp
        size = whole.value_size // whole.groups
        shared = {"group": group, "groups": whole.groups, "total": size}
        return extended(SharedMamba2, part, add_up=self._collectives.sum, **shared)

    def _make_layer_inputs(self, own: LayerInputsConfig | None) -> LayerInputs | None:
        found = super()._make_layer_inputs(own)
        if found is None:
            return None
        tokens = self._mapping.vocabulary(found.config.vocab_size)
        return extended(RankLayerInputs, found, collectives=self._collectives, tokens=tokens)

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
        total = heads * self.config.head_dim
        return extended(SharedNorm, norm, add_up=self._collectives.sum, share=share, total=total)

    def _embed(self, batch: ForwardBatch) -> Tensor:
        """After the first stage: the residual stream, or streams."""
        if self._mapping.is_first_stage:
            return super()._embed(batch)
        streams = () if self.config.altup is None else (self.config.altup.streams,)
        return self._receive(len(batch.input_ids), *streams, self.config.hidden_size)

    def _vectors(self, made_by: LayerInputs, x: Tensor, batch: ForwardBatch) -> Tensor:
        assert isinstance(made_by, RankLayerInputs)
        if self._mapping.is_first_stage:
            made = made_by.made(x, batch.lora)
        else:
            left = made_by.config.layers - self._mapping.stage_layers(made_by.config.layers).start
            made = self._receive(len(x), left, made_by.config.dim)
        return made_by.of_stage(ids_of(batch), made)

    def _enter(self, x: Tensor, batch: ForwardBatch, kv: KvTensors) -> Tensor:
        if self._mapping.is_first_stage:
            return super()._enter(x, batch, kv)
        for one in self._kv_received:
            shape = self.config.kv_planes, len(x), one.heads, one.dim
            got = self._collectives.receive_hidden(torch.empty(shape, dtype=kv[0].dtype, device=self._device))
            if one.place is None:
                self._passed_on[one.layer] = got
            else:
                kv[one.place].view(shape[0], -1, *shape[2:])[:, batch.attention.slots] = got
        return x

    def _leave(
        self, x: Tensor, delta: Tensor | None, batch: ForwardBatch, kv: KvTensors, inputs: Tensor | None
    ) -> Tensor:
        mapping, send = self._mapping, self._collectives.send_hidden
        if mapping.is_last_stage:
            return super()._leave(x, delta, batch, kv, inputs)
        if self.config.post_norm:  # of this stage's last layer
            assert delta is not None, "blocks whose norms come last leave the sum to them"
            send(self._final_norm.add(x, delta, batch.lora)[1])
        else:
            send(x if delta is None else x + delta)
        if inputs is not None:
            send(inputs[self.config.num_layers :].transpose(0, 1))
        for one in self._kv_sent:
            if one.place is None:
                kept = self._passed_on.pop(one.layer)
            else:
                kept = kv[one.place].flatten(1, 2)[:, batch.attention.slots]
            send(kept)
        return self._answer(batch)

    def _pool(self, x: Tensor, delta: Tensor | None, pooled: HiddenRows, lora: LoraBatch | None) -> None:
        """With several stages, `_logits` sends them to rank 0, after the hidden states."""
        if self._mapping.rank == 0 and self._mapping.pp_size == 1:
            super()._pool(x, delta, pooled, lora)

    def _wanted(self, batch: ForwardBatch) -> None:
        """None: other stages read all rows."""

    def _logits(self, x: Tensor, delta: Tensor | None, batch: ForwardBatch) -> Tensor:
        """On the last stage."""
        logits, mapping, pooled = (
            self._to_rank_0(super()._logits(x, delta, batch)),
            self._mapping,
            batch.pooled,
        )
        if mapping.pp_size > 1 and mapping.tp_rank == 0 and pooled is not None:
            self._collectives.send_back(self._hidden(x, delta, pooled.rows, batch.lora))
        return logits


class RankEncoderDecoder(SharedLayers, EncoderDecoder):
    """A stage has layers of both stacks. The cache has keys and values of this rank's heads, for the decoder
    layers of its stage. The output of the encoder's last stage is sent to all stages, for their
    cross-attention.

    more: EncoderDecoder's max_seq_len. `forward` returns logits on rank 0, and [0, vocab] on others.
    """

    def _enter(self, batch: ForwardBatch, stack: Stack) -> Tensor:
        if self._mapping.is_first_stage:
            return super()._enter(batch, stack)
        return self._receive(len(batch.input_ids), self.config.hidden_size)

    def _encoded(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        if self._mapping.is_last_stage:
            return self._collectives.from_last(super()._encoded(x, batch))
        self._collectives.send_hidden(x)
        return self._collectives.from_last(torch.empty_like(x))

    def _logits(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        if self._mapping.is_last_stage:
            return self._to_rank_0(super()._logits(x, batch))
        self._collectives.send_hidden(x)
        return self._answer(batch)
