"""A model with one rank's weights, with communication added around its layers: SharedLayers, what every kind
of model does differently if ranks share its layers, RankDecoder, RankEncoderDecoder, and load_rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from manylora.checkpoints.quant.config import QuantConfig
from manylora.config.blocks import LayerInputsConfig, Mamba2Config
from manylora.config.model import ModelConfig, MoeConfig
from manylora.kernels.device import Device
from manylora.kernels.lora import HostPairs
from manylora.kernels.panels import Panels, look_up
from manylora.kernels.recurrent import Mamba2Weights, RecurrentState, StateBatch
from manylora.kernels.reference import ReferenceOps
from manylora.kernels.spec import LoraBatch, LoraTarget
from manylora.model.batch import ForwardBatch, HiddenRows, KvTensors
from manylora.model.decoder import Decoder, ids_of
from manylora.model.encoder_decoder import EncoderDecoder, Stack
from manylora.model.layers import Attends, Attention, FeedForward, LayerInputs, LoraLinear, Mlp, Norm
from manylora.model.moe import ExpertsBesideMlp, Moe, Router, in_pairs
from manylora.model.transformer import Transformer
from manylora.model.weights import load_weights, tied_head
from manylora.ranks.adapters import kv_for_next, kv_from_before
from manylora.ranks.channel import Collectives
from manylora.ranks.mapping import rank_config
from manylora.ranks.weights import rank_plan

T = TypeVar("T")
# Row-parallel, so that a rank's result is a partial sum. Experts' and shared experts' results are summed
# together, once per layer.
SUMMED = ("out", "cross_out", "recurrent_out", "down")


@dataclass(frozen=True)
class SummedLinear(LoraLinear):
    """A layer with a part of its inputs on this rank."""

    add_up: Callable[[Tensor], Tensor] = lambda x: x

    def __call__(self, x: Tensor, lora: LoraBatch | None) -> Tensor:
        return self.add_up(super().__call__(x, lora))


@dataclass(frozen=True)
class SummedMlp:
    """A mixture of experts with a part of their width, or with some of the experts."""

    mlp: Callable[..., Tensor]
    add_up: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor, lora: LoraBatch | None, *scored: Tensor) -> Tensor:
        return self.add_up(self.mlp(x, lora, *scored))


@dataclass(frozen=True)
class SpreadMlp(Mlp):
    """A part of an MLP whose gate is cut by mean and deviation over its whole width. total: that width."""

    add_up: Callable[[Tensor], Tensor] = lambda x: x
    total: int = 0

    def _spread(self, gate: Tensor) -> tuple[Tensor, Tensor]:
        mean = self.add_up(gate.sum(-1, keepdim=True)) / self.total
        squares = self.add_up((gate - mean).square().sum(-1, keepdim=True))
        return mean, (squares / self.total).sqrt()


@dataclass(frozen=True)
class SharedNorm(Norm):
    """Over all heads at once, of which this rank has some. share: less than 1 if others have them, too."""

    add_up: Callable[[Tensor], Tensor] = lambda x: x
    share: float = 1.0
    total: int = 0

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        squares = self.add_up(wide.square().sum(-1, keepdim=True)) * self.share
        normed = wide * torch.rsqrt(squares / self.total + self.eps)
        return (weight * normed.to(weight.dtype)).to(x.dtype)


def extended(kind: type[T], layer: Any, **more: Any) -> T:
    """A layer as an instance of a subclass of its class. more: the fields that the subclass adds."""
    return kind(**{field.name: getattr(layer, field.name) for field in fields(layer)}, **more)


def look_up_shared(
    ids: Tensor, table: Tensor | Panels, tokens: range, dtype: torch.dtype, collectives: Collectives
) -> Tensor:
    """A table [len(tokens), n] with these tokens -> [T, n] in `dtype`; other ranks add the other rows."""
    own = ids - tokens.start
    mine = (own >= 0) & (own < len(tokens))
    x = look_up(own.where(mine, 0), table).to(dtype)
    return collectives.sum(x.where(mine.unsqueeze(1), 0))


class SharedLayers(Transformer):
    """Must precede the kind of model in a class's bases. config: as from `rank_config`. model: the whole
    model's. weights: as in `rank_plan`. more: further arguments of the kind of model.
    """

    def __init__(
        self,
        config: ModelConfig,
        model: ModelConfig,
        weights: dict[str, Any],
        dtype: torch.dtype,
        ops: ReferenceOps,
        collectives: Collectives,
        *more: Any,
    ) -> None:
        self._model, self._mapping, self._collectives = model, collectives.mapping, collectives
        self._tokens = self._mapping.vocabulary(model.vocab_size)
        super().__init__(config, weights, dtype, ops, *more)

    def _linear(self, layer: int, name: str, *targets: LoraTarget) -> LoraLinear:
        found = super()._linear(layer, name, *targets)
        if self._mapping.tp_size == 1 or name not in SUMMED:
            return found
        return extended(SummedLinear, found, add_up=self._collectives.sum)

    def _mlp(self, layer: int) -> Mlp:
        mlp = super()._mlp(layer)
        if self._mapping.tp_size == 1 or mlp.cutoff is None:
            return mlp
        total = self.config.of_layer(layer).intermediate_size * self._mapping.tp_size
        return extended(SpreadMlp, mlp, add_up=self._collectives.sum, total=total)

    def _look_up(self, ids: Tensor, table: Tensor | Panels) -> Tensor:
        if self._mapping.tp_size == 1:
            return super()._look_up(ids, table)
        return look_up_shared(ids, table, self._tokens, self.dtype, self._collectives)

    def _head_rows(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """On the first rank of a stage. Each rank has the logits of some tokens. bias: for all tokens."""
        mapping, tokens = self._mapping, self._tokens
        if not len(x):  # none are needed
            return torch.empty((0, self._model.vocab_size), device=self._device)
        part = bias if bias is None else bias[tokens.start : tokens.stop]
        logits = super()._head_rows(x, part)
        if mapping.tp_size == 1:
            return logits
        assert logits is not None
        sizes = [len(mapping.at(rank).vocabulary(self._model.vocab_size)) for rank in range(mapping.tp_size)]
        # Pad all parts to the width of the first, which is the widest.
        parts = self._collectives.gather(F.pad(logits, (0, sizes[0] - logits.shape[1])))
        if parts is None:
            return None
        return torch.cat([one[:, :size] for one, size in zip(parts, sizes, strict=True)], dim=1)

    def _receive(self, *shape: int) -> Tensor:
        return self._collectives.receive_hidden(torch.empty(shape, dtype=self.dtype, device=self._device))

    def _to_rank_0(self, logits: Tensor) -> Tensor:
        """On the last stage. Returns the result of this rank's forward pass."""
        if self._mapping.pp_size == 1:
            return logits
        if self._mapping.tp_rank == 0 and len(logits):
            self._collectives.send_back(logits)
        return torch.empty((0, self.config.vocab_size), device=self._device)

    def _answer(self, batch: ForwardBatch) -> Tensor:
        count, where, pooled = len(batch.logits_rows), self._device, batch.pooled
        rows = 0 if self._mapping.rank else count
        logits = torch.empty((rows, self.config.vocab_size), device=where)
        if self._mapping.rank:
            return logits
        if count:
            logits = self._collectives.receive_back(logits)
        if pooled is not None:
            config = self.config
            # A decoder's last layer projects to the width of its embedding, an encoder's does not.
            width = None if config.bidirectional else config.projected_size
            shape = len(pooled.rows), width or config.hidden_size
            hidden = torch.empty(shape, dtype=self.dtype, device=where)
            pooled.hidden = self._collectives.receive_back(hidden)
        return logits


@dataclass(frozen=True)
class MoePart(Moe):
    """With experts [first, first + config.num_experts) of the router's; others contribute 0 to the sum."""

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
class SharedMamba2:
    """Mamba-2 on one rank, if heads that are normalised together are on several. group: of this rank's heads,
    of `groups`, with `total` values over all its ranks. add_up: sums over ranks, [T, groups].
    """

    ops: ReferenceOps
    weights: Mamba2Weights
    add_up: Callable[[Tensor], Tensor]
    group: int
    groups: int
    total: int

    def __call__(self, rows: Tensor, state: RecurrentState, batch: StateBatch) -> Tensor:
        own = self.weights
        assert own.norm is not None
        plain = self.ops.mamba2(rows, replace(own, norm_groups=0), state, batch).float()
        gate = F.silu(rows[:, : own.value_size].float())
        y = plain * gate if own.gate_first else plain
        squares = y.new_zeros(len(y), self.groups)
        squares[:, self.group] = y.square().sum(-1)
        mean = self.add_up(squares)[:, self.group, None] / self.total
        y = y * (mean + own.eps).rsqrt() * own.norm
        return (y if own.gate_first else y * gate).to(rows.dtype)


@dataclass(frozen=True)
class RankLayerInputs(LayerInputs):
    """The columns of this stage's layers and the rows of `tokens`. The first stage computes the parts from
    embeddings for all layers, because only it has these and the adapters' rows of that matrix.
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
        collectives: Collectives,
    ) -> None:
        self._quantised_experts = False
        super().__init__(config, model, weights, dtype, ops, collectives)
        self._decode_step = None  # because it is one call from the first layer to the last
        self._kv_received = kv_from_before(model, self._mapping)
        self._kv_sent = kv_for_next(model, self._mapping)
        self._passed_on: dict[int, Tensor] = {}  # keys and values by layer, within a step
        if model.moe is not None:  # on any stage, because they decide what adapters may have
            self._quantised_experts = not self._collectives.least(not super().has_quantised_experts)

    @property
    def has_quantised_experts(self) -> bool:
        return self._quantised_experts

    def _router(self, layer: int, moe: MoeConfig) -> Router:
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

    def _mamba2(self, weights: Mamba2Weights) -> Callable[..., Tensor]:
        whole, tp = self._model.recurrent, self._mapping.tp_size
        assert isinstance(whole, Mamba2Config)
        if tp == 1 or weights.norm is None or whole.groups % tp == 0:
            return super()._mamba2(weights)
        group = self._mapping.tp_rank * whole.groups // tp
        size = whole.value_size // whole.groups
        return SharedMamba2(self._ops, weights, self._collectives.sum, group, whole.groups, size)

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
        logits = self._to_rank_0(super()._logits(x, delta, batch))
        if self._mapping.pp_size > 1 and self._mapping.tp_rank == 0 and batch.pooled is not None:
            self._collectives.send_back(self._hidden(x, delta, batch.pooled.rows, batch.lora))
        return logits


class RankEncoderDecoder(SharedLayers, EncoderDecoder):
    """A stage has layers of both stacks; the cache, those of its decoder. The output of the encoder's last
    stage is sent to all. `forward` returns logits on rank 0, and [0, vocab] on others.
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


def load_rank(
    model_dir: Path,
    model: ModelConfig,
    dtype: torch.dtype,
    device: Device,
    collectives: Collectives,
    quant: QuantConfig | None = None,
    max_seq_len: int | None = None,
) -> RankDecoder | RankEncoderDecoder:
    """As `load_decoder`, for one rank."""
    mapping = collectives.mapping
    local = rank_config(model, mapping)
    found, weights = load_weights(
        model_dir, model, dtype, device, quant, lambda plan: rank_plan(plan, model, mapping)
    )
    local = replace(local, tie_word_embeddings=found.tie_word_embeddings)
    if "head.weight" not in weights and mapping.is_last_stage and not local.bidirectional:
        weights["head.weight"] = tied_head(weights["embed"], device)
    others = range(0 if local.altup is None else local.altup.streams - 1)
    ends = [
        "head.weight",
        "embed",
        *(f"altup.{end}.{n}.weight" for end in ("enter", "leave") for n in others),
    ]
    if local.layer_inputs is not None:
        ends += ["layer_inputs.project.weight", "layer_inputs.norm.weight"]
    if local.projected_size:
        ends += ["0.project_in.weight", "0.project_out.weight"]
    for name in ends:  # weights that this stage does not have
        weights.setdefault(name, torch.empty((0, local.hidden_size), dtype=dtype, device=device.torch))
    # For experts whose outputs are summed, one rank has the bias, and the others add nothing.
    moe = local.moe
    for layer in moe.layers if moe is not None and moe.biased else ():
        for expert in range(moe.num_experts if moe is not None else 0):
            nothing = torch.zeros(local.hidden_size, dtype=dtype, device=device.torch)
            weights.setdefault(f"{layer}.expert.{expert}.down.bias", nothing)
    common = local, model, weights, dtype, device.ops, collectives
    return RankDecoder(*common) if model.encoder is None else RankEncoderDecoder(*common, max_seq_len)
