"""Per-layer embeddings: vectors that layers get of each token beside the residual stream."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from manylora.config.blocks import LayerInputsConfig
from manylora.kernels.spec import LoraBatch
from manylora.model.layers import LoraLinear, Norm

HALF = 2.0**-0.5  # keeps the sum of two vectors as long as one


@dataclass(frozen=True)
class LayerInputs:
    """table: [vocab_size, layers * dim]. project: hidden to layers * dim. norm: over dim."""

    config: LayerInputsConfig
    table: Tensor
    project: LoraLinear
    norm: Norm

    def __call__(self, ids: Tensor, x: Tensor, lora: LoraBatch | None) -> Tensor:
        """ids [T]; x [T, hidden], their embeddings -> [layers, T, dim]."""
        dim, hidden = self.config.dim, x.shape[1]
        ids = ids.where(ids < self.config.vocab_size, 0)
        scale = torch.tensor(dim**0.5, dtype=x.dtype)  # rounded before it is used, as in training
        looked_up = F.embedding(ids, self.table).to(x.dtype) * scale.item()
        made = self.project(x, lora) * torch.tensor(hidden**-0.5, dtype=x.dtype).item()
        made = self.norm(made.unflatten(-1, (-1, dim)), lora)
        whole = (made + looked_up.view(made.shape)) * torch.tensor(HALF, dtype=x.dtype).item()
        return whole.transpose(0, 1)


@dataclass(frozen=True)
class LayerInput:
    """norm(project(f(gate x) * own)), which is added to the residual stream behind a block."""

    gate: LoraLinear
    project: LoraLinear
    norm: Norm
    activation: str

    def __call__(self, x: Tensor, own: Tensor, lora: LoraBatch | None) -> Tensor:
        """x [T, hidden], own [T, dim]: the layer's vectors -> [T, hidden]."""
        gated = self.gate.ops.gated(torch.cat((own, self.gate(x, lora)), dim=-1), self.activation)
        return self.norm(self.project(gated, lora), lora)
