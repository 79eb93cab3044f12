"""Protects the gated delta rule: the compiled kernel equals the reference at every level of instruction sets,
and a row has the same bits however its sequence is divided and whatever is beside it."""

from __future__ import annotations

import pytest
import torch
from levels import PARAMS, open_library
from recurrent_states import DECODING, PROMPTS, SLOTS, TAPS, check_parts, copy, table

from manylora.kernels.compiled import CompiledOps
from manylora.kernels.recurrent import DeltaWeights, RecurrentState
from manylora.kernels.reference import ReferenceOps

SHAPES = [
    (2, 6, 12, 10),
    (1, 2, 128, 128),
    (2, 2, 16, 24),
    (1, 3, 7, 1),
]  # heads of keys, values; their sizes


def make(key_heads: int, heads: int, key_dim: int, value_dim: int, rows: int) -> tuple:
    picks = torch.Generator().manual_seed(rows)
    channels, values = 2 * key_heads * key_dim + heads * value_dim, heads * value_dim

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=picks)

    decay, norm = -random(heads).abs() / 4, 1 + random(value_dim) / 4
    weights = DeltaWeights(random(TAPS, channels), decay, random(heads), norm, 1e-6, key_heads, key_dim)
    state = RecurrentState(random(SLOTS, TAPS - 1, channels), random(SLOTS, heads, value_dim, key_dim) / 4)
    # Inputs are columns of wider matrices, as those of a fused projection may be.
    return random(rows, channels + values + 5)[:, 5:], random(rows, 2 * heads + 3)[:, 3:], weights, state


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("level", PARAMS)
def test_the_kernel_is_the_reference(level: str, shape: tuple) -> None:
    ops = CompiledOps(open_library(level))
    for counts, *others in (PROMPTS, DECODING):
        x, gates, weights, state = make(*shape, sum(counts))
        mine, theirs = copy(state), copy(state)
        batch = table(counts, *others)
        found = ops.delta_rule(x, gates, weights, mine, batch)
        expected = ReferenceOps().delta_rule(x, gates, weights, theirs, batch)
        torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-5)
        torch.testing.assert_close(mine.inputs, theirs.inputs, rtol=0, atol=0)
        torch.testing.assert_close(mine.memory, theirs.memory, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES[:2])
@pytest.mark.parametrize("level", PARAMS[:3])
def test_parts_and_company_change_no_bit(level: str, shape: tuple) -> None:
    ops, count = CompiledOps(open_library(level)), 23
    x, gates, weights, state = make(*shape, count)
    layer = lambda rows, *states: ops.delta_rule(x[rows], gates[rows], weights, *states)  # noqa: E731
    check_parts(layer, state, 4, ((8, 15), (1,) * count, (20, 2, 1)))


def test_what_no_sequence_has_stays_as_it_is() -> None:
    counts = [3, 1]
    x, gates, weights, state = make(*SHAPES[0], sum(counts))
    before = copy(state)
    state.memory[8], state.inputs[8] = float("nan"), float("nan")
    ReferenceOps().delta_rule(x, gates, weights, state, table(counts, [-1, 2], [1, 2], [0, 0], [-1, -1]))
    used = [1, 2, 8]
    kept = [slot for slot in range(SLOTS) if slot not in used]
    assert torch.equal(state.memory[kept], before.memory[kept])
    assert state.memory[[1, 2]].isfinite().all()
