"""States of recurrent layers, and what must hold for all that computes such a layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from manylora.kernels.recurrent import RecurrentState, StateBatch

SLOTS, TAPS = 9, 4
# Rows of each sequence; reads, writes, cuts, saves: from zeros, a slot of its own or another one; with and
# without a copy.
PROMPTS = [5, 1, 7, 1, 2], [0, -1, 2, 5, -1], [0, 1, 3, 5, 4], [2, 0, 7, 0, 1], [7, -1, 8, -1, 6]
DECODING = [1, 1, 1], [4, -1, 0], [4, 2, 1], [0, 1, 0], [-1, 6, -1]

Layer = Callable[[slice | list[int], RecurrentState, StateBatch], torch.Tensor]
"""The output for some rows of the input; it changes the states."""


def table(counts: Sequence[int], *others: Sequence[int]) -> StateBatch:
    """counts: rows of each sequence. others: reads, writes, cuts, saves."""
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    return StateBatch(*map(torch.tensor, (starts, *others)))


def copy(state: RecurrentState) -> RecurrentState:
    return RecurrentState(state.inputs.clone(), state.memory.clone())


def check_parts(layer: Layer, state: RecurrentState, company: int, all_cuts: Sequence[Sequence[int]]) -> None:
    """A sequence has the same bits whole and alone, and cut in several ways and beside another sequence.

    state: to start from. company: rows of the other one. all_cuts: rows of each part, once for each way; the
    state after the very first part is compared with a copy that the whole sequence has left there.
    """
    whole, border, count = copy(state), all_cuts[0][0], sum(all_cuts[0])
    expected = layer(slice(None), whole, table([count], [-1], [3], [border], [5]))
    for cuts in all_cuts:
        parts, found, start = copy(state), [], 0
        for number, size in enumerate(cuts):
            rows = [*range(company), *range(start, start + size)]
            batch = table([company, size], [0, 3 if number else -1], [1, 3], [0, 0], [-1, -1])
            found.append(layer(rows, parts, batch)[company:])
            start += size
            if start == border:
                assert torch.equal(parts.inputs[3], whole.inputs[5])
                assert torch.equal(parts.memory[3], whole.memory[5])
        assert torch.equal(torch.cat(found), expected)
        assert torch.equal(parts.inputs[3], whole.inputs[3])
        assert torch.equal(parts.memory[3], whole.memory[3])
