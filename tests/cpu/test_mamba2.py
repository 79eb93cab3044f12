"""Protects Mamba-2: the compiled kernel equals the reference at every level of instruction sets, the products
of matrices that prompts are computed with equal the recurrence, and with the kernel a row has the same bits
however its sequence is divided and whatever is beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from levels import PARAMS, open_library
from recurrent_states import DECODING, PROMPTS, SLOTS, TAPS, check_parts, copy, table

from manylora.kernels.compiled import CompiledOps
from manylora.kernels.recurrent import CHUNK, Mamba2Weights, RecurrentState
from manylora.kernels.reference import ReferenceOps

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


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("level", PARAMS)
def test_the_kernel_is_the_reference(level: str, shape: tuple[int, int, int, int], form: dict) -> None:
    ops = CompiledOps(open_library(level))
    for counts, *others in (PROMPTS, DECODING):
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
@pytest.mark.parametrize("level", PARAMS[:3])
def test_parts_and_company_change_no_bit(level: str, shape: tuple[int, int, int, int]) -> None:
    ops, count = CompiledOps(open_library(level)), 23
    x, weights, state = make(*shape, count)
    layer = lambda rows, *states: ops.mamba2(x[rows], weights, *states)  # noqa: E731
    check_parts(layer, state, 4, ((8, 15), (1,) * count, (20, 2, 1)))
