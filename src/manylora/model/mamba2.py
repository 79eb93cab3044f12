"""Mamba2: a recurrent layer with Mamba-2, used instead of attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from manylora.config.blocks import Mamba2Config
from manylora.kernels.mamba2 import Mamba2Weights
from manylora.kernels.reference import ReferenceOps
from manylora.kernels.spec import LoraBatch
from manylora.model.delta_rule import LayerState
from manylora.model.layers import LoraLinear


@dataclass(frozen=True)
class Mamba2:
    """project: to [z; values; b; c; d]. factors: on these, in the compute dtype; None: none."""

    ops: ReferenceOps
    project: LoraLinear
    out: LoraLinear
    weights: Mamba2Weights
    factors: Tensor | None = None

    def __call__(self, x: Tensor, cache: LayerState, lora: LoraBatch | None) -> Tensor:
        rows = self.project(x, lora)
        rows = rows if self.factors is None else rows * self.factors
        return self.out(self._mixed(rows, cache), lora)

    def _mixed(self, rows: Tensor, cache: LayerState) -> Tensor:
        """[T, values + channels + heads] -> [T, values]."""
        return self.ops.mamba2(rows, self.weights, cache.state, cache.batch)


def mamba2_factors(own: Mamba2Config, device: torch.device, dtype: torch.dtype) -> Tensor | None:
    if set(own.scales) <= {1.0}:
        return None
    keys = own.groups * own.state_dim
    sizes = torch.tensor((own.value_size, own.value_size, keys, keys, own.heads))
    return torch.tensor(own.scales).repeat_interleave(sizes).to(device, dtype)


def mamba2_weights(own: Mamba2Config, weights: Mapping[str, Tensor], eps: float) -> Mamba2Weights:
    """weights: of the layer, by our names."""
    taps = weights["taps"].T.contiguous()
    bias = weights["taps_bias"] if own.conv_bias else torch.zeros_like(taps[0])
    return Mamba2Weights(
        taps=taps,
        bias=bias,
        decay=-weights["decay"].exp(),
        shift=weights["shift"],
        skip=weights["skip"],
        norm=weights["inner_norm.weight"] if own.normed else None,
        eps=eps,
        groups=own.groups,
        head_dim=own.head_dim,
        state_dim=own.state_dim,
        norm_groups=own.groups,
        gate_first=own.gate_first,
        least=own.steps[0],
        most=own.steps[1],
    )
