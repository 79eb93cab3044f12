"""Protects Mamba-2: the compiled kernel equals the reference at every level of instruction sets, the products
of matrices that prompts are computed with equal the recurrence, and with the kernel a row has the same bits
however its sequence is divided and whatever is beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from levels import NAMES, open_library

from manylora.kernels.compiled import CompiledOps
from manylora.kernels.mamba2 import CHUNK, Mamba2Weights
from manylora.kernels.recurrent import RecurrentState, StateBatch
from manylora.kernels.reference import ReferenceOps

SLOTS, TAPS = 9, 4
SHAPES = [
    (6, 2, 10, 12),
    (2, 1, 64, 128),
    (4, 2, 24, 16),
    (3, 3, 1, 7),
    (4, 1, 9, 12),
]  # heads, groups, sizes of values, b
FORMS = [
    {},
    {"gate_first": False},
    {"norm": None},
    {"norm_groups": 1, "least": 0.4, "most": 0.9},
    {"norm_groups": 0},
]


def make(
    heads: int, groups: int, dim: int, size: int, rows: int
) -> tuple[torch.Tensor, Mamba2Weights, RecurrentState]:
    picks = torch.Generator().manual_seed(rows)
    channels = heads * dim + 2 * groups * size

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=picks)

    decay, norm = -random(heads).abs() / 4, 1 + random(heads * dim) / 4
    vectors = (random(channels) / 4, decay, random(heads), random(heads), norm)
    weights = Mamba2Weights(random(TAPS, channels) / 2, *vectors, 1e-5, groups, dim, size, groups)
    state = RecurrentState(random(SLOTS, TAPS - 1, channels), random(SLOTS, heads, dim, size) / 4)
    # Inputs are columns of a wider matrix, as those of a fused projection may be.
    return random(rows, heads * dim + channels + heads + 5)[:, 5:], weights, state


def table(counts: list[int], *others: list[int]) -> StateBatch:
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    return StateBatch(*map(torch.tensor, (starts, *others)))


def copy(state: RecurrentState) -> RecurrentState:
    return RecurrentState(state.inputs.clone(), state.memory.clone())


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("level", NAMES)
def test_the_kernel_is_the_reference(level: str, shape: tuple[int, int, int, int], form: dict) -> None:
    """From zeros, a slot of its own or another one; with and without a copy; prompts and decoding rows."""
    ops = CompiledOps(open_library(level))
    for counts, *others in (
        ([5, 1, 7, 1, 2], [0, -1, 2, 5, -1], [0, 1, 3, 5, 4], [2, 0, 7, 0, 1], [7, -1, 8, -1, 6]),
        ([1, 1, 1], [4, -1, 0], [4, 2, 1], [0, 0, 0], [-1, -1, -1]),
    ):
        x, weights, state = make(*shape, sum(counts))
        weights = replace(weights, **form)
        mine, theirs = copy(state), copy(state)
        batch = table(counts, *others)
        found = ops.mamba2(x, weights, mine, batch)
        expected = ReferenceOps().mamba2(x, weights, theirs, batch)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(mine.inputs, theirs.inputs, rtol=0, atol=0)
        torch.testing.assert_close(mine.memory, theirs.memory, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_prompt_in_chunks_is_the_recurrence(shape: tuple[int, int, int, int]) -> None:
    count = 2 * CHUNK + 5
    x, weights, state = make(*shape, count)
    whole, rows = copy(state), copy(state)
    found = ReferenceOps().mamba2(x, weights, whole, table([count], [2], [2], [0], [-1]))
    batch = table([1], [2], [2], [0], [-1])
    expected = torch.cat([ReferenceOps().mamba2(x[i : i + 1], weights, rows, batch) for i in range(count)])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(whole.memory, rows.memory, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES[:2])
@pytest.mark.parametrize("level", NAMES[:3])
def test_parts_and_company_change_no_bit(level: str, shape: tuple[int, int, int, int]) -> None:
    ops, count = CompiledOps(open_library(level)), 23
    x, weights, state = make(*shape, count)
    whole = copy(state)
    expected = ops.mamba2(x, weights, whole, table([count], [-1], [3], [8], [5]))
    for cuts in ((8, 15), (1,) * count, (20, 2, 1)):
        parts, found, start = copy(state), [], 0
        for number, size in enumerate(cuts):
            both = torch.cat((x[:4], x[start : start + size]))
            batch = table([4, size], [0, 3 if number else -1], [1, 3], [0, 0], [-1, -1])
            found.append(ops.mamba2(both, weights, parts, batch)[4:])
            start += size
            if start == 8:
                for one, other in ((parts.inputs[3], whole.inputs[5]), (parts.memory[3], whole.memory[5])):
                    assert torch.equal(one, other)
        assert torch.equal(torch.cat(found), expected)
        assert torch.equal(parts.inputs[3], whole.inputs[3])
        assert torch.equal(parts.memory[3], whole.memory[3])
