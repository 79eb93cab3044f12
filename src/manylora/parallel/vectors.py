"""RankLayerInputs: the per-layer embeddings of one rank, which has some tokens of the table."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from manylora.model.layer_inputs import LayerInputs
from manylora.parallel.collectives import Collectives
from manylora.parallel.layers import look_up_shared


@dataclass(frozen=True)
class RankLayerInputs(LayerInputs):
    """The table's columns are those of the layers of this stage, its rows those of `tokens`.

    What is made of embeddings, the first stage makes for all layers: no other has the embeddings, nor the
    adapters' rows of that matrix.
    """

    collectives: Collectives
    tokens: range

    def look_up(self, ids: Tensor) -> Tensor:
        if len(self.tokens) == self.config.vocab_size:
            return super().look_up(ids)
        return look_up_shared(ids, self.table, self.tokens, self.table.dtype, self.collectives)

    def of_stage(self, ids: Tensor, made: Tensor) -> Tensor:
        """made: of the layers of this stage and of those behind it, [T, layers, dim] -> [layers, T, dim]:
        those of this stage as the blocks take them, the others as they were made."""
        count = self.table.shape[1] // self.config.dim
        own = self.add(ids, made[:, :count])
        return torch.cat((own, made[:, count:].transpose(0, 1)))
