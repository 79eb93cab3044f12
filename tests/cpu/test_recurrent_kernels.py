"""Protects the kernels of recurrent layers, compiled and on the GPU's path: they say what the reference says,
and a row has the same bits however its sequence is divided and whatever is beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from levels import PARAMS, open_library
from test_cuda_kernels import DEVICE
from torch import Tensor

from manylora.kernels.compiled import CompiledOps
from manylora.kernels.cuda import recurrent
from manylora.kernels.cuda.ops import CudaOps
from manylora.kernels.recurrent import CHUNK, DeltaWeights, Mamba2Weights, RecurrentState, StateBatch
from manylora.kernels.reference import ReferenceOps
from manylora.kernels.transfer import to_device

SLOTS, TAPS = 9, 4
# Rows of each sequence; reads, writes, cuts, saves: from zeros, a slot of its own or another one; with and
# without a copy.
PROMPTS = [5, 1, 7, 1, 2], [0, -1, 2, 5, -1], [0, 1, 3, 5, 4], [2, 0, 7, 0, 1], [7, -1, 8, -1, 6]
DECODING = [1, 1, 1], [4, -1, 0], [4, 2, 1], [0, 1, 0], [-1, 6, -1]
FEW_ROWS = [2, 1], [0, -1], [1, 2], [1, 0], [5, -1]

# Heads, groups, sizes of values and of b.
MAMBA2 = [(6, 2, 10, 12), (2, 1, 64, 128), (4, 2, 24, 16), (3, 3, 1, 7), (4, 1, 9, 12)]
FORMS = [
    {}, {"gate_first": False}, {"norm": None}, {"norm_groups": 1, "least": 0.4, "most": 0.9},
    {"norm_groups": 0},
]  # fmt: skip
# Heads of keys and of values, and their sizes.
DELTA = [(2, 6, 12, 10), (1, 2, 128, 128), (2, 2, 16, 24), (1, 3, 7, 1)]
COMPILED = [
    *(("mamba2", shape, form) for shape in MAMBA2 for form in FORMS),
    *(("delta rule", shape, {}) for shape in DELTA),
]
ON_GPU = [
    *(("mamba2", shape, form) for shape, form in zip(MAMBA2, FORMS, strict=True)),
    *(("delta rule", shape, {}) for shape in DELTA),
    *(("convolution", (channels,), {}) for channels in (7, 300)),
]
SMALL = [("mamba2", (3, 3, 1, 7), {}), ("delta rule", (1, 2, 7, 5), {}), ("convolution", (7,), {})]
# Shapes of prompts: few, as the same kernels compute decoding.
QUICK = ((3, 3, 1, 7), (1, 3, 7, 1), (7,), (300,))
LARGE = 128  # elements of a head's row: few rows of these, which the interpreter takes seconds for

Layer = Callable[[ReferenceOps, slice | list[int], RecurrentState, StateBatch], Tensor]
"""The output of some rows of the input by some operations, which change the states."""


def make(
    kind: str, shape: tuple[int, ...], form: dict, rows: int, dtype: torch.dtype = torch.float32,
    device: torch.device = DEVICE,
) -> tuple[Layer, RecurrentState]:  # fmt: skip
    """A layer, and states to start from. Inputs are columns of wider matrices, as of a fused projection."""
    picks = torch.Generator().manual_seed(rows)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=picks).to(device)

    def inputs(columns: int) -> Tensor:
        return random(rows, columns + 5)[:, 5:].to(dtype)

    if kind == "mamba2":
        heads, groups, dim, size = shape
        channels = heads * dim + 2 * groups * size
        vectors = random(channels) / 4, -random(heads).abs() / 4, random(heads), random(heads)
        norm = 1 + random(heads * dim) / 4
        mixer = Mamba2Weights(random(TAPS, channels) / 2, *vectors, norm, 1e-5, groups, dim, size, groups)
        mixer, x = replace(mixer, **form), inputs(heads * dim + channels + heads)
        state = RecurrentState(random(SLOTS, TAPS - 1, channels), random(SLOTS, heads, dim, size) / 4)
        return lambda ops, at, *states: ops.mamba2(x[at], mixer, *states), state
    if kind == "delta rule":
        key_heads, heads, key_dim, dim = shape
        channels = 2 * key_heads * key_dim + heads * dim
        decay, norm, taps = -random(heads).abs() / 4, 1 + random(dim) / 4, random(TAPS, channels)
        rule = DeltaWeights(taps, decay, random(heads), norm, 1e-6, key_heads, key_dim)
        state = RecurrentState(random(SLOTS, TAPS - 1, channels), random(SLOTS, heads, dim, key_dim) / 4)
        x, gates = inputs(channels + heads * dim), inputs(2 * heads)
        return lambda ops, at, *states: ops.delta_rule(x[at], gates[at], rule, *states), state
    x, taps = inputs(3 * shape[0]), random(TAPS, *shape)
    state = RecurrentState(random(SLOTS, TAPS - 1, *shape), torch.empty(SLOTS, 0, device=device))
    return lambda ops, at, *states: ops.short_conv(x[at], taps, *states), state


def table(counts: Sequence[int], *others: Sequence[int]) -> StateBatch:
    """counts: rows of each sequence. others: reads, writes, cuts, saves."""
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    return StateBatch(*map(torch.tensor, (starts, *others)))


def copy(state: RecurrentState) -> RecurrentState:
    return RecurrentState(state.inputs.clone(), state.memory.clone())


def check(
    ops: ReferenceOps, layer: Layer, state: RecurrentState, rows: Sequence[Sequence[int]], rtol: float = 2e-4,
    atol: float = 5e-5,
) -> None:  # fmt: skip
    """Output and states are those of the reference."""
    batch = to_device(table(*rows), state.inputs.device)
    mine, theirs = copy(state), copy(state)
    found = layer(ops, slice(None), mine, batch)
    expected = layer(ReferenceOps(), slice(None), theirs, batch)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
    torch.testing.assert_close(mine.inputs, theirs.inputs, rtol=0, atol=0)
    torch.testing.assert_close(mine.memory, theirs.memory, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "shape", "form"), COMPILED, ids=str)
@pytest.mark.parametrize("level", PARAMS)
def test_the_compiled_kernels_are_the_reference(
    level: str, kind: str, shape: tuple[int, ...], form: dict
) -> None:
    exact = {"rtol": 1e-5, "atol": 1e-5} if kind == "mamba2" else {"rtol": 2e-4, "atol": 2e-5}
    for rows in (PROMPTS, DECODING):
        layer, state = make(kind, shape, form, sum(rows[0]), device=torch.device("cpu"))
        check(CompiledOps(open_library(level)), layer, state, rows, **exact)


@pytest.mark.parametrize(
    ("rows", "kind", "shape", "form"),
    [
        *((DECODING, *case) for case in ON_GPU),
        *((FEW_ROWS if LARGE in case[1] else PROMPTS, *case) for case in ON_GPU if case[1] in QUICK),
        *(
            pytest.param(FEW_ROWS if LARGE in case[1] else PROMPTS, *case, marks=pytest.mark.extended)
            for case in ON_GPU
            if case[1] not in QUICK
        ),
    ],
    ids=str,
)
def test_the_gpu_s_kernels_are_the_reference(
    rows: tuple[list[int], ...],
    kind: str,
    shape: tuple[int, ...],
    form: dict,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recurrent, "BLOCK", 128)  # so that there are several, and of a head's memory too
    if LARGE not in shape:
        monkeypatch.setattr(recurrent, "TILE", 64)
    check(CudaOps(), *make(kind, shape, form, sum(rows[0])), rows)


@pytest.mark.parametrize(("kind", "shape", "form"), SMALL, ids=str)
def test_inputs_of_16_bits(kind: str, shape: tuple[int, ...], form: dict) -> None:
    """Widened before anything is computed, as the reference does; the state stays float32."""
    layer, state = make(kind, shape, form, sum(PROMPTS[0]), torch.bfloat16)
    check(CudaOps(), layer, state, PROMPTS, rtol=2e-2, atol=1e-3)


def check_parts(
    layer: Layer, ops: ReferenceOps, state: RecurrentState, company: int, *all_cuts: Sequence[int]
) -> None:
    """A sequence has the same bits whole and alone, and cut in several ways and beside another sequence.

    company: rows of the other one. all_cuts: rows of each part, once for each way; the state after the very
    first part is compared with a copy that the whole sequence has left there.
    """

    def run(rows: slice | list[int], states: RecurrentState, *batch: Sequence[int]) -> Tensor:
        return layer(ops, rows, states, to_device(table(*batch), state.inputs.device))

    whole, border, count = copy(state), all_cuts[0][0], sum(all_cuts[0])
    expected = run(slice(None), whole, [count], [-1], [3], [border], [5])
    for cuts in all_cuts:
        parts, found, start = copy(state), [], 0
        for number, size in enumerate(cuts):
            rows = [*range(company), *range(start, start + size)]
            made = run(rows, parts, [company, size], [0, 3 if number else -1], [1, 3], [0, 0], [-1, -1])
            found.append(made[company:])
            start += size
            if start == border:
                assert torch.equal(parts.inputs[3], whole.inputs[5])
                assert torch.equal(parts.memory[3], whole.memory[5])
        assert torch.equal(torch.cat(found), expected)
        assert torch.equal(parts.inputs[3], whole.inputs[3])
        assert torch.equal(parts.memory[3], whole.memory[3])


@pytest.mark.parametrize(
    ("kind", "shape"),
    [*(("mamba2", shape) for shape in MAMBA2[:2]), *(("delta rule", shape) for shape in DELTA[:2])],
)
@pytest.mark.parametrize("level", PARAMS[:3])
def test_parts_and_company_change_no_bit(level: str, kind: str, shape: tuple[int, ...]) -> None:
    layer, state = make(kind, shape, {}, 23, device=torch.device("cpu"))
    check_parts(layer, CompiledOps(open_library(level)), state, 4, (8, 15), (1,) * 23, (20, 2, 1))


@pytest.mark.parametrize(("kind", "shape", "form"), SMALL, ids=str)
def test_parts_and_company_change_no_bit_on_a_gpu(kind: str, shape: tuple[int, ...], form: dict) -> None:
    layer, state = make(kind, shape, form, 6)
    check_parts(layer, CudaOps(), state, 1, (2, 4), (1,) * 6, (3, 2, 1))


@pytest.mark.parametrize(("kind", "shape", "form"), SMALL, ids=str)
def test_padded_rows_store_nothing(kind: str, shape: tuple[int, ...], form: dict) -> None:
    """Those of a recorded step; and slots that none reads need not hold numbers."""
    layer, state = make(kind, shape, form, 3)
    state.inputs[8], state.memory[8] = float("nan"), float("nan")
    after, batch = copy(state), table([1, 1, 1], [2, -1, -1], [2, -1, -1], [0, 0, 0], [-1, -1, -1])
    found = layer(CudaOps(), slice(None), after, to_device(batch, DEVICE))
    assert found.isfinite().all()
    kept = [slot for slot in range(8) if slot != 2]
    assert torch.equal(after.inputs[kept], state.inputs[kept])
    assert torch.equal(after.memory[kept], state.memory[kept])
    assert not torch.equal(after.inputs[2], state.inputs[2])


@pytest.mark.parametrize("shape", MAMBA2)
def test_a_prompt_in_chunks_is_the_recurrence(shape: tuple[int, ...]) -> None:
    count = 2 * CHUNK + 5
    layer, state = make("mamba2", shape, {}, count)
    whole, rows = copy(state), copy(state)
    batches = [to_device(table([n], [2], [2], [0], [-1]), DEVICE) for n in (count, 1)]
    found = layer(ReferenceOps(), slice(None), whole, batches[0])
    expected = [layer(ReferenceOps(), slice(i, i + 1), rows, batches[1]) for i in range(count)]
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(whole.memory, rows.memory, rtol=1e-4, atol=1e-4)
