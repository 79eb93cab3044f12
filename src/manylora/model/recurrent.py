"""RecurrentLayer: a layer with state of a fixed size: a delta rule, Mamba-2 or a convolution."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from manylora.config.blocks import Mamba2Config, RecurrentConfig
from manylora.kernels.recurrent import Mamba2Weights, RecurrentState, StateBatch
from manylora.kernels.spec import LoraBatch
from manylora.model.layers import LoraLinear


@dataclass(frozen=True)
class RecurrentLayer:
    """project: to [q; k; v; z] of a delta rule, to [z; values; b; c; d] of Mamba-2, or to [b; c; h] of a
    convolution. mix: the operation with its weights, from these rows, and from those of `gates`. gates: of a
    delta rule, to [b; a], which control writing and forgetting. factors: on the rows, in the compute dtype.
    """

    project: LoraLinear
    out: LoraLinear
    mix: Callable[..., Tensor]
    gates: LoraLinear | None = None
    factors: Tensor | None = None

    def __call__(self, x: Tensor, lora: LoraBatch | None, state: RecurrentState, batch: StateBatch) -> Tensor:
        rows = self.project(x, lora)
        rows = rows if self.factors is None else rows * self.factors
        inputs = (rows,) if self.gates is None else (rows, self.gates(x, lora))
        return self.out(self.mix(*inputs, state=state, batch=batch), lora)


def make_states(config: RecurrentConfig, slots: int, device: torch.device) -> RecurrentState:
    return RecurrentState(
        *(torch.zeros(len(config.layers), slots, *shape, device=device) for shape in config.state_shapes)
    )


def passing_states(
    config: RecurrentConfig, starts: Sequence[int], device: torch.device
) -> tuple[RecurrentState, StateBatch]:
    """States for sequences that start with this batch and are not continued."""
    count = len(starts) - 1
    none, slots = torch.full((count,), -1, device=device), torch.arange(count, device=device)
    batch = StateBatch(torch.tensor(list(starts), device=device), none, slots, torch.zeros_like(slots), none)
    return make_states(config, count, device), batch


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
