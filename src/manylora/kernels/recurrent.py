"""Recurrent layers in plain PyTorch: their states, how rows of sequences update them, gated delta rules,
Mamba-2 and gated causal convolutions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST_DIM, MOST_TAPS = 256, 16  # of a head and a convolution: limited by the C kernels' stack arrays


@dataclass(frozen=True)
class RecurrentState:
    """The states of sequences in slots, float32, of one layer, or of all layers with one more dimension.

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
        """Copy between slots, in all layers. No slot is in both."""
        for tensor in (self.inputs, self.memory):
            tensor[:, targets] = tensor[:, sources]


@dataclass(frozen=True)
class StateBatch:
    """Locations of the states of a batch's S sequences. All int64.

    starts: [S + 1], rows starts[s]:starts[s + 1] belong to sequence s.
    reads, writes: [S], the slots of its state before and after these rows; -1: start from zeros.
    cuts, saves: [S], the number of its rows after which its state is also stored in slot saves[s]; 0: not
        stored.
    """

    starts: Tensor
    reads: Tensor
    writes: Tensor
    cuts: Tensor
    saves: Tensor

    def storing_nothing(self) -> StateBatch:
        """The same for kernels that support -1 in `writes`: no state is stored."""
        return replace(self, writes=torch.full_like(self.writes, -1), cuts=torch.zeros_like(self.cuts))


Run = Callable[[Sequence[Tensor], Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""Rows of sequences, each [B, n, N], and their states -> output [B, n, M], and both new states."""


def run_rows(rows: Sequence[Tensor], state: RecurrentState, batch: StateBatch, run: Run) -> Tensor:
    """The output [T, M] of the rows, each [T, N]. States are read and stored according to `batch`.

    Sequences with one row are computed together, others one by one.
    """
    starts, cuts = batch.starts.tolist(), batch.cuts.tolist()
    if starts[-1] == len(starts) - 1 and not any(cuts):
        y, inputs, memory = run([one[:, None] for one in rows], *_read(state, batch.reads))
        state.inputs[batch.writes], state.memory[batch.writes] = inputs, memory
        return y[:, 0]
    out = []
    for s, (start, stop) in enumerate(pairwise(starts)):
        inputs, memory = _read(state, batch.reads[s : s + 1])
        for first, last in ((start, start + cuts[s]), (start + cuts[s], stop)):
            if first < last:
                y, inputs, memory = run([one[None, first:last] for one in rows], inputs, memory)
                out.append(y[0])
            if first == start and cuts[s]:
                state.inputs[batch.saves[s]], state.memory[batch.saves[s]] = inputs[0], memory[0]
        state.inputs[batch.writes[s]], state.memory[batch.writes[s]] = inputs[0], memory[0]
    return torch.cat(out)


def convolve(seen: Tensor, taps: Tensor) -> Tensor:
    """seen [B, taps - 1 + n, channels] -> [B, n, channels]. Taps are added one by one, so a row's result does
    not depend on neighbouring rows.
    """
    count = seen.shape[1] - len(taps) + 1
    mixed = seen[:, :count] * taps[0]
    for tap in range(1, len(taps)):
        mixed = mixed + seen[:, tap : tap + count] * taps[tap]
    return mixed


def _read(state: RecurrentState, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Copies of the convolution's last inputs and of the memory. Zeros for slot -1."""
    return _read_slots(state.inputs, slots), _read_slots(state.memory, slots)


def _read_slots(states: Tensor, slots: Tensor) -> Tensor:
    found = states[slots.clamp(min=0)]
    found[slots < 0] = 0  # assigned, not multiplied: unused slots may hold non-finite values
    return found


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
    run = partial(_run_delta, weights=weights)
    return run_rows((x.float(), gates.float()), state, batch, run).to(x.dtype)


def _run_delta(
    rows: Sequence[Tensor], inputs: Tensor, memory: Tensor, weights: DeltaWeights
) -> tuple[Tensor, Tensor, Tensor]:
    """x [B, n, channels + values], gates [B, n, 2 * heads] -> output [B, n, values] and both new states."""
    x, gates = rows
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
    return run_rows((x.float(),), state, batch, partial(_run_mamba, weights=weights)).to(x.dtype)


def _run_mamba(
    rows: Sequence[Tensor], inputs: Tensor, memory: Tensor, weights: Mamba2Weights
) -> tuple[Tensor, Tensor, Tensor]:
    """x [B, n, values + channels + heads] -> output [B, n, values] and both new states."""
    (x,), values, keys = rows, weights.value_size, weights.groups * weights.state_dim
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
            some = slice(first, first + CHUNK)
            part, memory = _chunk(fade[:, some], added[:, some], b[:, some], c[:, some], memory)
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


def short_conv(x: Tensor, taps: Tensor, state: RecurrentState, batch: StateBatch) -> Tensor:
    """As `ReferenceOps.short_conv`."""

    def run(rows: Sequence[Tensor], inputs: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        b, c, h = rows[0].chunk(3, dim=-1)
        seen = torch.cat((inputs, b * h), dim=1)
        return c * convolve(seen, taps), seen[:, c.shape[1] :], memory

    return run_rows((x.float(),), state, batch, run).to(x.dtype)
