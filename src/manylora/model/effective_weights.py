"""HeldWeights: what `load_decoder` makes of a stored weight, for who reads the checkpoint beside it."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from manylora.config.engine import ModelConfig
from manylora.kernels.quantised import QuantisedWeight
from manylora.model.plan import checkpoint_plan
from manylora.model.quant import chosen, quantise
from manylora.quant.config import QuantConfig

__all__ = ["HeldWeights"]


class HeldWeights:
    """Of one checkpoint, on any thread. quant: what plain linear layers are rounded to when they are loaded.
    dtype: what the model computes in, which scales are rounded to; not known: float32, which keeps them."""

    def __init__(
        self, config: ModelConfig, quant: QuantConfig | None, dtype: torch.dtype = torch.float32
    ) -> None:
        self._config, self._dtype, self._quant = config, dtype, quant
        self._rounded: frozenset[str] | None = None  # once the names in the checkpoint are known

    def __call__(
        self, name: str, names: Collection[str], weight: Tensor | QuantisedWeight
    ) -> Tensor | QuantisedWeight:
        """name: of the weight in the checkpoint; names: of all tensors there; weight: some of its rows."""
        if isinstance(weight, QuantisedWeight):
            return weight.to(self._dtype)
        if self._quant is None or not self._quant.any_weights:
            return weight
        if self._rounded is None:
            self._rounded = frozenset(self._sources(names, self._quant))
        return quantise(weight.to(self._dtype), self._quant) if name in self._rounded else weight

    def _sources(self, names: Collection[str], quant: QuantConfig) -> set[str]:
        """Layers that are fused when they are loaded are rounded together, or not at all."""
        found: set[str] = set()
        for ours, part in checkpoint_plan(self._config, names).items():
            sources = [piece.source for piece in part.pieces]
            if chosen(ours, sources, quant):
                found.update(sources)
        return found
