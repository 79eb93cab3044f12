"""RankEncoder and RankEncoderDecoder: these models of one rank's weights. Their layers are in one stage."""

from __future__ import annotations

from typing import Any

import torch

from manylora.config.engine import ModelConfig
from manylora.kernels.reference import ReferenceOps
from manylora.model.encoder import Encoder
from manylora.model.encoder_decoder import EncoderDecoder
from manylora.parallel.collectives import Collectives
from manylora.parallel.layers import SharedLayers
from manylora.parallel.mapping import Mapping


class RankEncoder(SharedLayers, Encoder):
    """The arguments are RankDecoder's. Every rank has the hidden states."""

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
        super().__init__(config, weights, dtype, ops)


class RankEncoderDecoder(SharedLayers, EncoderDecoder):
    """The arguments are RankDecoder's, and EncoderDecoder's max_seq_len. The cache has the keys and values of
    this rank's heads, of both stacks.

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
        max_seq_len: int | None = None,
    ) -> None:
        self._share(model, mapping, collectives)
        EncoderDecoder.__init__(self, config, weights, dtype, ops, max_seq_len)
