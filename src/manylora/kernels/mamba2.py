"""Mamba-2 after a causal convolution, in plain PyTorch, for recurrent layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from manylora.kernels.recurrent import RecurrentState, StateBatch, convolve, run_rows

CHUNK = 64  # rows of a prompt that are computed together as matrix products


@dataclass(frozen=True)
class Mamba2Weights:
    """Weights of one layer, float32.

    taps: [taps, channels] of the convolution, newest input last. bias: [channels]. decay, shift, skip:
    [heads]; a head's step is softplus(d + shift), clamped to `least` and `most`, and it keeps exp(decay *
    step) of its memory. norm: [heads * head_dim], or None for no norm. norm_groups: number of groups
    normalised separately; 0: neither gate nor norm is applied. gate_first: the gate is applied before the
    norm, otherwise after it.
    """

    taps: Tensor
    bias: Tensor
    decay: Tensor
    shift: Tensor
    skip: Tensor
    norm: Tensor | None
    eps: float
    groups: int
    head_dim: int
    state_dim: int
    norm_groups: int = 1
    gate_first: bool = True
    least: float = 0.0
    most: float = float("inf")

    @property
    def heads(self) -> int:
        return self.decay.shape[0]

    @property
    def value_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        return self.taps.shape[1]


def mamba2(x: Tensor, weights: Mamba2Weights, state: RecurrentState, batch: StateBatch) -> Tensor:
    """As `ReferenceOps.mamba2`."""

    def run(rows: Sequence[Tensor], inputs: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _run(rows[0], weights, inputs, memory)

    return run_rows((x.float(),), state, batch, run).to(x.dtype)


def _run(x: Tensor, weights: Mamba2Weights, inputs: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x [B, n, values + channels + heads] -> output [B, n, values] and both new states."""
    values, keys = weights.value_size, weights.groups * weights.state_dim
    count, heads = x.shape[1], weights.heads
    z, raw, d = x.split((values, weights.channels, heads), dim=-1)
    seen = torch.cat((inputs, raw), dim=1)
    mixed = F.silu(convolve(seen, weights.taps) + weights.bias)
    v, b, c = mixed.split((values, keys, keys), dim=-1)
    v = v.unflatten(-1, (heads, weights.head_dim))
    grouped = (weights.groups, weights.state_dim)
    b, c = (one.unflatten(-1, grouped).repeat_interleave(heads // weights.groups, 2) for one in (b, c))
    step = F.softplus(d + weights.shift).clamp(weights.least, weights.most)
    fade, added = weights.decay * step, v * step[..., None]
    if count == 1:
        memory = memory * fade[:, 0].exp()[..., None, None] + added[:, 0, ..., None] * b[:, 0, :, None]
        y = (memory * c[:, 0, :, None]).sum(-1)[:, None]
    else:
        parts = []
        for first in range(0, count, CHUNK):
            rows = slice(first, first + CHUNK)
            part, memory = _chunk(fade[:, rows], added[:, rows], b[:, rows], c[:, rows], memory)
            parts.append(part)
        y = torch.cat(parts, dim=1)
    y = (y + weights.skip[:, None] * v).flatten(2)
    return _gated(y, F.silu(z), weights), seen[:, count:], memory


def _chunk(fade: Tensor, added: Tensor, b: Tensor, c: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Compute rows as matrix products. Returns the output and the memory after it.

    fade [B, n, heads]: log of the share of memory that a row keeps. added [B, n, heads, head_dim]: added by
    each row. b, c [B, n, heads, state_dim].
    """
    total = fade.cumsum(1).transpose(1, 2)  # [B, heads, n]: kept since the chunk's start
    since = (total[..., :, None] - total[..., None, :]).masked_fill(
        torch.ones(fade.shape[1], fade.shape[1], dtype=torch.bool, device=fade.device).triu(1), float("-inf")
    )
    added, b, c = (one.transpose(1, 2) for one in (added, b, c))
    y = (c @ b.mT * since.exp()) @ added + (c @ memory.mT) * total.exp()[..., None]
    left = (total[..., -1:] - total).exp()[..., None]
    memory = memory * total[..., -1].exp()[..., None, None] + (added * left).mT @ b
    return y.transpose(1, 2), memory


def _gated(y: Tensor, gate: Tensor, weights: Mamba2Weights) -> Tensor:
    """y, gate [B, n, values]."""
    if not weights.norm_groups:
        return y
    if weights.norm is None:
        return y * gate
    grouped = (y * gate if weights.gate_first else y).unflatten(-1, (weights.norm_groups, -1))
    scales = torch.rsqrt(grouped.square().mean(-1, keepdim=True) + weights.eps)
    normed = (grouped * scales).flatten(-2) * weights.norm
    return normed if weights.gate_first else normed * gate
