"""RankEncoder and RankEncoderDecoder: these models with one rank's weights."""

from __future__ import annotations

import torch
from torch import Tensor

from manylora.model.batch import ForwardBatch
from manylora.model.encoder import Encoder
from manylora.model.encoder_decoder import EncoderDecoder, Stack
from manylora.parallel.layers import SharedLayers


class RankEncoder(SharedLayers, Encoder):
    """Rank 0 has the hidden states; without stages every rank has them."""

    def _embed(self, batch: ForwardBatch) -> Tensor:
        if self._mapping.is_first_stage:
            return super()._embed(batch)
        return self._receive(len(batch.input_ids), self.config.hidden_size)

    def _leave(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        mapping = self._mapping
        if not mapping.is_last_stage:
            self._collectives.send_hidden(x)
            return self._answer(batch)
        logits = super()._leave(x, batch)
        if mapping.tp_rank == 0 and not mapping.is_first_stage and batch.pooled is not None:
            assert batch.pooled.hidden is not None
            self._collectives.send_back(batch.pooled.hidden)
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
