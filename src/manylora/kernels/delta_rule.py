"""Gated delta rules after a causal convolution, in plain PyTorch, for recurrent layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from manylora.kernels.recurrent import RecurrentState, StateBatch, convolve, run_rows

NORM_EPS = 1e-6  # added to the squared length of queries and keys


@dataclass(frozen=True)
class DeltaWeights:
    """Weights of one layer, float32.

    taps: [taps, channels] of the convolution, newest input last. decay, shift: [value heads]; a gate value a
    keeps exp(decay * softplus(a + shift)) of the memory. norm: [value_dim].
    """

    taps: Tensor
    decay: Tensor
    shift: Tensor
    norm: Tensor
    eps: float
    key_heads: int
    key_dim: int

    @property
    def value_heads(self) -> int:
        return self.decay.shape[0]

    @property
    def value_dim(self) -> int:
        return self.norm.shape[0]

    @property
    def key_size(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def channels(self) -> int:
        return self.taps.shape[1]


def delta_rule(
    x: Tensor, gates: Tensor, weights: DeltaWeights, state: RecurrentState, batch: StateBatch
) -> Tensor:
    """As `ReferenceOps.delta_rule`."""

    def run(rows: Sequence[Tensor], inputs: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, gates = rows
        return _run(x, gates, weights, inputs, memory)

    return run_rows((x.float(), gates.float()), state, batch, run).to(x.dtype)


def _run(
    x: Tensor, gates: Tensor, weights: DeltaWeights, inputs: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """x [B, n, channels + values], gates [B, n, 2 * heads] -> output [B, n, values] and both new states."""
    heads, dim, size = weights.value_heads, weights.value_dim, weights.key_size
    count, keys = x.shape[1], (weights.key_heads, weights.key_dim)
    raw, z = x[..., : weights.channels], x[..., weights.channels :].unflatten(-1, (heads, dim))
    seen = torch.cat((inputs, raw), dim=1)
    q, k, v = F.silu(convolve(seen, weights.taps)).split((size, size, heads * dim), dim=-1)
    q, k = (_unit(one.unflatten(-1, keys)).repeat_interleave(heads // keys[0], 2) for one in (q, k))
    q, v = q * weights.key_dim**-0.5, v.unflatten(-1, (heads, dim))
    b, a = gates.chunk(2, dim=-1)
    beta, keep = torch.sigmoid(b), torch.exp(weights.decay * F.softplus(a + weights.shift))
    out = torch.empty_like(v)
    for t in range(count):
        memory = memory * keep[:, t, :, None, None]
        known = (memory * k[:, t, :, None]).sum(-1)
        change = (v[:, t] - known) * beta[:, t, :, None]
        memory = memory + change[..., None] * k[:, t, :, None]
        out[:, t] = (memory * q[:, t, :, None]).sum(-1)
    normed = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + weights.eps) * weights.norm
    return (normed * F.silu(z)).flatten(2), seen[:, count:], memory


def _unit(x: Tensor) -> Tensor:
    """Normalised to length 1 over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)
