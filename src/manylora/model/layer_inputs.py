"""Per-layer embeddings: vectors per token that layers get in addition to the residual stream."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from manylora.config.blocks import LayerInputsConfig
from manylora.kernels.panels import Panels, look_up
from manylora.kernels.spec import LoraBatch
from manylora.model.layers import LoraLinear, Norm

HALF = 2.0**-0.5  # keeps the magnitude of a sum of two vectors


@dataclass(frozen=True)
class LayerInputs:
    """table [vocab_size, layers * dim]. project: hidden to layers * dim. norm: over dim."""

    config: LayerInputsConfig
    table: Tensor | Panels
    project: LoraLinear
    norm: Norm

    def __call__(self, ids: Tensor, x: Tensor, lora: LoraBatch | None) -> Tensor:
        """ids [T]; x [T, hidden]: their embeddings -> [layers, T, dim]."""
        return self.add(ids, self.made(x, lora))

    def made(self, x: Tensor, lora: LoraBatch | None) -> Tensor:
        """The parts computed from the tokens' embeddings, [T, layers, dim]."""
        made = self.project(x, lora) * torch.tensor(x.shape[1] ** -0.5, dtype=x.dtype).item()
        return self.norm(made.unflatten(-1, (-1, self.config.dim)), lora)

    def add(self, ids: Tensor, made: Tensor) -> Tensor:
        """made: of the layers that the table covers. Adds the lookups: [layers, T, dim]."""
        ids = ids.where(ids < self.config.vocab_size, 0)
        scale = torch.tensor(self.config.dim**0.5, dtype=made.dtype)  # rounded before use, as in training
        looked_up = self.look_up(ids).to(made.dtype) * scale.item()
        whole = (made + looked_up.view(made.shape)) * torch.tensor(HALF, dtype=made.dtype).item()
        return whole.transpose(0, 1)

    def look_up(self, ids: Tensor) -> Tensor:
        """[T] -> [T, layers * dim], in the table's dtype or wider."""
        return look_up(ids, self.table)


@dataclass(frozen=True)
class LayerInput:
    """norm(project(f(gate x) * own)), which is added to the residual stream after a block."""

    gate: LoraLinear
    project: LoraLinear
    norm: Norm
    activation: str

    def __call__(self, x: Tensor, own: Tensor, lora: LoraBatch | None) -> Tensor:
        """x [T, hidden], own [T, dim]: the layer's vectors -> [T, hidden]."""
        gated = self.gate.ops.gated(torch.cat((own, self.gate(x, lora)), dim=-1), self.activation)
        return self.norm(self.project(gated, lora), lora)
