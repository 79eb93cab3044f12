"""AltUp (several residual streams, one of which goes through each layer's attention and MLP), and Laurel.

Before a layer every stream is predicted from all streams. After it every stream is corrected by the change
that the layer made to its own stream. The mixing uses a few coefficients per token, computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from manylora.kernels.spec import LoraBatch
from manylora.model.layers import AddInput, Attends, FeedForward, LogitRows, LoraLinear, Norm

LEAST = 1e-5  # minimum mean square when scaling a stream


@dataclass(frozen=True)
class Streams:
    """Splits embeddings into streams, and joins these. enter, leave: for each stream but the first."""

    enter: tuple[LoraLinear, ...]
    leave: tuple[LoraLinear, ...]

    def split(self, x: Tensor, lora: LoraBatch | None) -> Tensor:
        """x [T, hidden] -> [T, streams, hidden], all with the magnitude of x."""
        size = _magnitude(x)
        return torch.stack([x, *(_scaled(linear(x, lora), size) for linear in self.enter)], dim=1)

    def merge(self, streams: Tensor, lora: LoraBatch | None) -> Tensor:
        """[T, streams, hidden] -> [T, hidden]: their mean, all scaled to the magnitude of the first."""
        first, *others = (stream.contiguous() for stream in streams.unbind(1))
        size, total = _magnitude(first), first.float()
        for linear, stream in zip(self.leave, others, strict=True):
            total = total + _scaled(linear(stream, lora), size)
        return (total / streams.shape[1]).to(streams.dtype)


@dataclass(frozen=True)
class AltUp:
    """The mixing of one layer. router: hidden to streams. predict: streams to streams ** 2. correct: streams
    to streams. scale [hidden]: on the corrected stream from which the layer's own input is made; None: 1.
    """

    active: int  # the stream that goes through the layer
    router_norm: Norm
    router: LoraLinear
    predict: LoraLinear
    correct: LoraLinear
    scale: Tensor | None

    def predicted(self, streams: Tensor, lora: LoraBatch | None) -> Tensor:
        """streams [T, S, hidden]: to stream i, add the sum over j of coefficient[i, j] * stream j."""
        count = streams.shape[1]
        routed = self._routed(streams[:, self.active].contiguous(), lora)
        rates = self.predict(routed, lora).float().unflatten(-1, (count, count, 1))
        wide = streams.float()
        made = wide.clone()
        for j in range(count):
            made.addcmul_(rates[:, :, j], wide[:, j : j + 1])
        return made.to(streams.dtype)

    def corrected(self, streams: Tensor, new: Tensor, lora: LoraBatch | None) -> Tensor:
        """streams [T, S, hidden], as predicted. new [T, hidden]: the layer's output for its own stream."""
        rates = self.correct(self._routed(new, lora), lora).float() + 1
        change = new.float() - streams[:, self.active].float()
        return torch.addcmul(streams.float(), rates.unsqueeze(-1), change.unsqueeze(1)).to(streams.dtype)

    def _routed(self, x: Tensor, lora: LoraBatch | None) -> Tensor:
        seen = self.router_norm(x, lora) * (1 / x.shape[1])
        return torch.tanh(self.router(seen, lora).float()).to(x.dtype)


@dataclass(frozen=True)
class Laurel:
    """x + norm(right(left x)): a low-rank residual beside attention."""

    left: LoraLinear
    right: LoraLinear
    norm: Norm

    def __call__(self, x: Tensor, lora: LoraBatch | None) -> Tensor:
        return x + self.norm(self.right(self.left(x, lora), lora), lora)


@dataclass(frozen=True)
class AltUpBlock:
    """One decoder layer over streams. The per-layer input is added to all streams except the first."""

    attention: Attends
    mlp: FeedForward
    attention_norm: Norm
    attention_post_norm: Norm
    mlp_norm: Norm
    mlp_post_norm: Norm
    altup: AltUp
    laurel: Laurel
    add_input: AddInput

    def __call__(
        self,
        x: Tensor,
        delta: Tensor | None,
        mix: Callable[[Tensor], Tensor] | None,
        lora: LoraBatch | None,
        own: Tensor | None = None,
        wanted: LogitRows | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """x [T, streams, hidden]; delta and wanted: None."""
        assert own is not None and mix is not None and delta is None and wanted is None
        streams = self.altup.predicted(x, lora)
        active = streams[:, self.altup.active].contiguous()
        seen = self.attention_norm(active, lora)
        beside = self.laurel(seen, lora)
        mixed = self.attention_post_norm(mix(seen), lora)
        joined = (active + mixed + beside) / 2**0.5
        new = joined + self.mlp_post_norm(self.mlp(self.mlp_norm(joined, lora), lora), lora)
        streams = self.altup.corrected(streams, new, lora)
        first = streams[:, self.altup.active].contiguous()
        if self.altup.scale is not None:
            first = first * self.altup.scale
        streams[:, 1:] += self.add_input(first, own, lora).unsqueeze(1)
        return streams, None


def _magnitude(x: Tensor) -> Tensor:
    return x.float().square().mean(-1, keepdim=True).sqrt()


def _scaled(x: Tensor, size: Tensor) -> Tensor:
    wide = x.float()
    own = wide.square().mean(-1, keepdim=True).clamp(min=LEAST).sqrt()
    return (wide * size / own).to(x.dtype)
