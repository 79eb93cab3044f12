"""The states of recurrent layers, and how rows of sequences update them, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
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


def read_inputs(state: RecurrentState, slots: Tensor) -> Tensor:
    """Copies of the convolution's last inputs. Zeros for slot -1."""
    return _read_slots(state.inputs, slots)


def _read(state: RecurrentState, slots: Tensor) -> tuple[Tensor, Tensor]:
    return read_inputs(state, slots), _read_slots(state.memory, slots)


def _read_slots(states: Tensor, slots: Tensor) -> Tensor:
    found = states[slots.clamp(min=0)]
    found[slots < 0] = 0  # assigned, not multiplied: unused slots may hold non-finite values
    return found
