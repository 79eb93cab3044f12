"""Encoder: a stack of layers whose tokens attend to each other, for hidden states and labels of whole
prompts.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from manylora.config.model import ModelConfig
from manylora.kernels.reference import ReferenceOps
from manylora.kernels.spec import LoraTarget
from manylora.lora.modules import LoraModuleId
from manylora.model.attend import RelativeBias, attend_spans
from manylora.model.batch import ForwardBatch, KvTensors
from manylora.model.encoder_decoder import Layer, SelfAttention
from manylora.model.families import FAMILIES
from manylora.model.transformer import Transformer

MAX_DISTANCE = 128  # tokens; larger distances share a bucket of the relative bias


class Encoder(Transformer):
    """Takes the arguments of Transformer."""

    def __init__(
        self, config: ModelConfig, weights: dict[str, Any], dtype: torch.dtype, ops: ReferenceOps
    ) -> None:
        super().__init__(config, weights, dtype, ops)
        names = FAMILIES[config.architecture].names(config)
        self._embedding_norm = self._norm("embedding_norm", "embedding_norm")
        self._project = self._bias = None
        if config.projected_size:
            inner = LoraTarget(LoraModuleId.PROJECT_IN, 0, config.hidden_size)
            self._project = self._linear(0, "project_in", inner)
        if config.relative_buckets:
            longest = config.max_position_embeddings
            self._bias = RelativeBias(weights["relative"], MAX_DISTANCE, longest, both_ways=True)
        self._layers = [self._layer(number, names.block_norms) for number in range(config.num_layers)]

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: KvTensors) -> Tensor:
        """Process whole prompts without storing keys and values. Only `batch.pooled` is computed; the logits
        [0, vocab] are empty.
        """
        starts, lora, bias = batch.attention.query_starts, batch.lora, None
        if self._bias is not None:
            places = torch.arange(max(stop - start for start, stop in pairwise(starts)), device=self._device)
            bias = self._bias(places - places.unsqueeze(1)).to(self.dtype)

        def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend_spans(q, k, v, starts, self._attention_scale, bias)

        x = self._embed(batch)
        for layer in self._layers:
            x = layer.feed_forward(layer.attend(x, lora, mix), lora)
        return self._leave(x, batch)

    def _leave(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Steps after the last layer."""
        if batch.pooled is not None:
            batch.pooled.hidden = x[batch.pooled.rows]
        return torch.empty((0, self.config.vocab_size), device=self._device)

    def _embed(self, batch: ForwardBatch) -> Tensor:
        x = self._embed_tokens(batch, self._weights["embed"], "embed")
        x = self._add_types(x, batch) + F.embedding(self._places(batch), self._weights["positions"])
        x = x if self._embedding_norm is None else self._embedding_norm(x, batch.lora)
        return x if self._project is None else self._project(x, batch.lora)

    def _places(self, batch: ForwardBatch) -> Tensor:
        """Rows of the position table, [T]. A padding token uses the first row."""
        padding = self.config.padding_id
        if padding is None:
            return batch.positions
        counted = batch.input_ids != padding
        spans = [counted[start:stop].cumsum(0) for start, stop in pairwise(batch.attention.query_starts)]
        return torch.cat(spans) * counted

    def _layer(self, number: int, names: Any) -> Layer:
        attention_norm, mlp_norm = (
            self._norm(f"{number}.{part}", f"layers.{number}.{names[part]}")
            for part in ("attention_norm", "mlp_norm")
        )
        assert attention_norm is not None and mlp_norm is not None
        attention = SelfAttention(self.config, self._qkv(number), self._attention_out(number))
        return Layer(True, attention, None, self._mlp(number), attention_norm, None, mlp_norm)
