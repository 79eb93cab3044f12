"""RankLayerInputs: the per-layer embeddings on one rank, which has some tokens of the table."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from manylora.model.layer_inputs import LayerInputs
from manylora.parallel.collectives import Collectives
from manylora.parallel.layers import look_up_shared


@dataclass(frozen=True)
class RankLayerInputs(LayerInputs):
    """The table has the columns of this stage's layers and the rows of `tokens`.

    The first stage computes the parts from embeddings for all layers, because only it has the embeddings and
    the adapters' rows of that matrix.
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
