"""SharedLayers: what every kind of model does differently if ranks share its layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from manylora.config.model import ModelConfig
from manylora.kernels.panels import Panels, look_up
from manylora.kernels.reference import ReferenceOps
from manylora.kernels.spec import LoraBatch, LoraTarget
from manylora.model.batch import ForwardBatch
from manylora.model.layers import LoraLinear, Mlp, Norm
from manylora.model.transformer import Transformer
from manylora.parallel.collectives import Collectives
from manylora.parallel.mapping import Mapping

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
    """RMSNorm over all heads at once, of which this rank has some.

    share: of the heads on all ranks, the share that counts: less than 1 if several ranks have the same heads.
    total: elements of the whole.
    """

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
    """Look up rows of a table [len(tokens), n] that holds these tokens on this rank -> [T, n] in `dtype`.
    Each token's row is on one rank; the others add zeros.
    """
    own = ids - tokens.start
    mine = (own >= 0) & (own < len(tokens))
    x = look_up(own.where(mine, 0), table).to(dtype)
    return collectives.sum(x.where(mine.unsqueeze(1), 0))


class SharedLayers(Transformer):
    """Must precede the kind of model in a class's bases.

    config: as from `rank_config`. model: the whole model's. weights: as in `rank_plan`, with empty ones for
    the embedding and the head on stages without them. more: further arguments of the kind of model.
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
        *more: Any,
    ) -> None:
        self._model, self._mapping, self._collectives = model, mapping, collectives
        self._tokens = mapping.vocabulary(model.vocab_size)
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
        """On rank 0 the results of the last stage: logits, and hidden states after the final norm."""
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
