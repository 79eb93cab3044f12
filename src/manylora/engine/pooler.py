"""Pooler: turns the hidden states of a prompt into the result of a request for pooled outputs."""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakKeyDictionary

from torch import Tensor

from manylora.engine.scheduler import Chunk
from manylora.engine.sequence import Sequence
from manylora.kernels.extras import Extra
from manylora.model.heads import ClassificationHead, HeadLayer


class Pooler:
    """classifier: the model's own head, if it has one. layer: precedes a head of a single layer. dense:
    layers applied to embeddings, in order. activation: of the first layer of an adapter's head of two layers.
    """

    def __init__(
        self,
        classifier: ClassificationHead | None,
        layer: HeadLayer | None = None,
        dense: tuple[HeadLayer, ...] = (),
        activation: str = "tanh",
    ) -> None:
        self._dense, self._activation = dense, activation
        self._classifier, self._layer = classifier, layer
        self._sums: WeakKeyDictionary[Sequence, Tensor] = WeakKeyDictionary()  # for prompts in several chunks

    def __call__(self, chunk: Chunk, x: Tensor, extras: Mapping[str, Extra]) -> Tensor | None:
        """x [P, hidden], of `pooled_positions`. extras: of the chunk's adapter. Returns [n] float32, or [P,
        n] for all tokens.
        None: the prompt continues in another chunk.
        """
        sequence, pooling = chunk.sequence, chunk.sequence.request.pooling
        assert pooling is not None
        if pooling.mode == "mean" and not (chunk.ends and chunk.start == 0):
            total = x.float().sum(0)
            if chunk.start:
                total += self._sums[sequence]
            self._sums[sequence] = total
            if not chunk.ends:
                return None
            x = (total / sequence.num_prompt).to(x.dtype)[None]
        elif pooling.mode == "mean":
            x = x.float().mean(0, keepdim=True).to(x.dtype)
        if pooling.head:
            head = ClassificationHead.of_extras(extras, self._activation) or self._classifier
            assert head is not None, "checked when the request was taken"
            layer = self._layer
            if layer is not None and head.dense is None and (layer.config.each or pooling.mode != "all"):
                x = layer(x)
            x = head(x)
        elif pooling.mode != "all":
            for one in self._dense:
                x = one(x.float())
        return x.float() if pooling.mode == "all" else x[0].float()
