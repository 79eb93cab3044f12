"""Gated delta rules behind a causal convolution, in plain PyTorch, for recurrent layers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST_DIM, MOST_TAPS = 256, 16  # of a head, of a convolution: the C kernel's arrays on the stack
NORM_EPS = 1e-6  # of the lengths of queries and keys


@dataclass(frozen=True)
class RecurrentState:
    """The states of sequences in their slots, float32; of one layer, or with one more dimension of all.

    inputs: [slots, taps - 1, channels], the last inputs of the convolution, oldest first.
    memory: [slots, value heads, value_dim, key_dim].
    """

    inputs: Tensor
    memory: Tensor

    @property
    def num_slots(self) -> int:
        return self.inputs.shape[-3]

    def layer(self, number: int) -> RecurrentState:
        return RecurrentState(self.inputs[number], self.memory[number])

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Between slots, in all layers. No slot is among both."""
        for tensor in (self.inputs, self.memory):
            tensor[:, targets] = tensor[:, sources]


@dataclass(frozen=True)
class StateBatch:
    """Where the states of the S sequences of a batch are. All int64.

    starts: [S + 1], rows starts[s]:starts[s + 1] belong to sequence s.
    reads, writes: [S], the slots of its state before these rows, and after them; -1: it starts from zeros.
    cuts, saves: [S], the number of its rows after which its state is also stored in slot saves[s]; 0: it is
        not.
    """

    starts: Tensor
    reads: Tensor
    writes: Tensor
    cuts: Tensor
    saves: Tensor


@dataclass(frozen=True)
class DeltaWeights:
    """Of one layer, float32.

    taps: [taps, channels] of the convolution, the newest input's last. decay, shift: [value heads]; a gate a
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
    """As `ReferenceOps.delta_rule`. Sequences with one row each are done together, others one by one."""
    wide, narrow = x.float(), gates.float()
    starts = batch.starts.tolist()
    cuts = batch.cuts.tolist()
    out = torch.empty(len(x), weights.value_heads * weights.value_dim, device=x.device)
    if starts[-1] == len(starts) - 1 and not any(cuts):
        inputs, memory = _read(state, batch.reads)
        y, inputs, memory = _run(wide[:, None], narrow[:, None], weights, inputs, memory)
        out[:] = y[:, 0]
        state.inputs[batch.writes], state.memory[batch.writes] = inputs, memory
        return out.to(x.dtype)
    for s, (start, stop) in enumerate(pairwise(starts)):
        inputs, memory = _read(state, batch.reads[s : s + 1])
        for first, last in ((start, start + cuts[s]), (start + cuts[s], stop)):
            if first < last:
                part = wide[None, first:last], narrow[None, first:last]
                y, inputs, memory = _run(*part, weights, inputs, memory)
                out[first:last] = y[0]
            if first == start and cuts[s]:
                state.inputs[batch.saves[s]], state.memory[batch.saves[s]] = inputs[0], memory[0]
        state.inputs[batch.writes[s]], state.memory[batch.writes[s]] = inputs[0], memory[0]
    return out.to(x.dtype)


def read_inputs(state: RecurrentState, slots: Tensor) -> Tensor:
    """Copies of the convolution's last inputs; zeros for the slot -1."""
    return _read_slots(state.inputs, slots)


def _read(state: RecurrentState, slots: Tensor) -> tuple[Tensor, Tensor]:
    return read_inputs(state, slots), _read_slots(state.memory, slots)


def _read_slots(states: Tensor, slots: Tensor) -> Tensor:
    found = states[slots.clamp(min=0)]
    found[slots < 0] = 0  # not multiplied: what an unused slot holds need not be finite
    return found


def _run(
    x: Tensor, gates: Tensor, weights: DeltaWeights, inputs: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """x [B, n, channels + values], gates [B, n, 2 * heads] -> output [B, n, values] and both new states."""
    heads, dim, size = weights.value_heads, weights.value_dim, weights.key_size
    count, keys = x.shape[1], (weights.key_heads, weights.key_dim)
    raw, z = x[..., : weights.channels], x[..., weights.channels :].unflatten(-1, (heads, dim))
    seen = torch.cat((inputs, raw), dim=1)
    taps = len(weights.taps)
    mixed = torch.stack([seen[:, tap : tap + count] * weights.taps[tap] for tap in range(taps)]).sum(0)
    q, k, v = F.silu(mixed).split((size, size, heads * dim), dim=-1)
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
    """Of length 1, over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)
