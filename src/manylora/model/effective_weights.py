"""EffectiveWeights: a checkpoint's weights as the served model uses them in products.

DoRA's norms must be those of these weights, which loading may round. They are computed from the checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from manylora.config.model import ModelConfig
from manylora.kernels.quantised import QuantisedWeight
from manylora.model.plan import checkpoint_plan
from manylora.model.quant import quantise, should_quantise
from manylora.quant.config import QuantConfig


class EffectiveWeights:
    """The effective weights of one checkpoint. Thread-safe.

    quant: how plain linear layers are quantised at load time. dtype: the compute dtype, to which scales are
    rounded; float32 if unknown, which does not round them.
    """

    def __init__(
        self, config: ModelConfig, quant: QuantConfig | None, dtype: torch.dtype = torch.float32
    ) -> None:
        self._config, self._dtype, self._quant = config, dtype, quant
        self._quantised: frozenset[str] | None = None  # set once the checkpoint's names are known

    def __call__(
        self, name: str, names: Collection[str], weight: Tensor | QuantisedWeight
    ) -> Tensor | QuantisedWeight:
        """weight: some rows of the tensor `name`. names: all tensors in the checkpoint."""
        if isinstance(weight, QuantisedWeight):
            return weight.to(self._dtype)
        if self._quant is None or not self._quant.any_weights:
            return weight
        if self._quantised is None:
            self._quantised = frozenset(self._sources(names, self._quant))
        return quantise(weight.to(self._dtype), self._quant) if name in self._quantised else weight

    def _sources(self, names: Collection[str], quant: QuantConfig) -> set[str]:
        """The layers to quantise. Layers that are fused at load time are all quantised, or none."""
        found: set[str] = set()
        for ours, spec in checkpoint_plan(self._config, names).items():
            sources = [piece.source for piece in spec.slices]
            if should_quantise(ours, sources, quant):
                found.update(sources)
        return found
