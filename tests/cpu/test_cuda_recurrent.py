"""Protects recurrent layers on the GPU's path: the kernels say what the reference says, prompts and decoding,
and a row has the same bits however its sequence is divided and whatever is beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import test_delta_rule
import test_mamba2
import torch
from recurrent_states import DECODING, PROMPTS, SLOTS, TAPS, check_parts, copy, table
from test_cuda_kernels import DEVICE
from torch import Tensor

from manylora.kernels.cuda import recurrent
from manylora.kernels.cuda.ops import CudaOps
from manylora.kernels.recurrent import RecurrentState, StateBatch
from manylora.kernels.reference import ReferenceOps
from manylora.kernels.transfer import to_device

Layer = Callable[[ReferenceOps, slice | list[int], RecurrentState, StateBatch], Tensor]
"""The output of some rows by some operations."""

CASES = [
    *(("mamba2", shape, form) for shape, form in zip(test_mamba2.SHAPES, test_mamba2.FORMS, strict=True)),
    *(("delta rule", shape, {}) for shape in test_delta_rule.SHAPES),
    *(("convolution", (channels,), {}) for channels in (7, 300)),
]
SMALL = [("mamba2", (3, 3, 1, 7), {}), ("delta rule", (1, 2, 7, 5), {}), ("convolution", (7,), {})]
# Shapes of prompts: few, as the same kernels compute decoding.
FEW = ((3, 3, 1, 7), (1, 3, 7, 1), (7,), (300,))
LARGE = 128  # elements of a head's row: few rows of these, which the interpreter takes seconds for


def make(  # type: ignore[no-untyped-def]
    kind: str, shape: tuple[int, ...], form: dict, rows: int, dtype: torch.dtype = torch.float32
):
    """The layer, and states to start from."""
    if kind == "mamba2":
        x, weights, state = to_device_all(*test_mamba2.make(*shape, rows))
        weights, x = replace(weights, **form), x.to(dtype)
        return lambda ops, at, *states: ops.mamba2(x[at], weights, *states), state
    if kind == "delta rule":
        x, gates, weights, state = to_device_all(*test_delta_rule.make(*shape, rows))
        x, gates = x.to(dtype), gates.to(dtype)
        return lambda ops, at, *states: ops.delta_rule(x[at], gates[at], weights, *states), state
    picks = torch.Generator().manual_seed(rows)
    x, taps, inputs = (
        torch.randn(size, generator=picks).to(DEVICE)
        for size in ((rows, 3 * shape[0] + 5), (TAPS, *shape), (SLOTS, TAPS - 1, *shape))
    )
    x = x[:, 5:].to(dtype)
    state = RecurrentState(inputs, torch.empty(SLOTS, 0, device=DEVICE))
    return lambda ops, at, *states: ops.short_conv(x[at], taps, *states), state


def to_device_all(*values):  # type: ignore[no-untyped-def]
    return [v.to(DEVICE) if isinstance(v, Tensor) else to_device(v, DEVICE) for v in values]


@pytest.mark.parametrize(
    ("rows", "kind", "shape", "form"),
    [
        *(("decoding", *case) for case in CASES),
        *(("prompts", *case) for case in CASES if case[1] in FEW),
        *(pytest.param("prompts", *case, marks=pytest.mark.extended) for case in CASES if case[1] not in FEW),
    ],
    ids=str,
)
def test_the_kernels_are_the_reference(
    rows: str, kind: str, shape: tuple[int, ...], form: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrent, "BLOCK", 128)  # so that there are several, and of a head's memory too
    if LARGE not in shape:
        monkeypatch.setattr(recurrent, "TILE", 64)
    counts, *others = PROMPTS if rows == "prompts" else DECODING
    if rows == "prompts" and LARGE in shape:
        counts, *others = [2, 1], [0, -1], [1, 2], [1, 0], [5, -1]
    layer, state = make(kind, shape, form, sum(counts))
    mine, theirs, batch = copy(state), copy(state), to_device(table(counts, *others), DEVICE)
    found = layer(CudaOps(), slice(None), mine, batch)
    expected = layer(ReferenceOps(), slice(None), theirs, batch)
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=5e-5)
    torch.testing.assert_close(mine.inputs, theirs.inputs, rtol=0, atol=0)
    torch.testing.assert_close(mine.memory, theirs.memory, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "shape", "form"), SMALL, ids=str)
def test_inputs_of_16_bits(kind: str, shape: tuple[int, ...], form: dict) -> None:
    """Widened before anything is computed, as the reference does; the state stays float32."""
    counts, *others = PROMPTS
    layer, state = make(kind, shape, form, sum(counts), torch.bfloat16)
    mine, theirs, batch = copy(state), copy(state), to_device(table(counts, *others), DEVICE)
    found = layer(CudaOps(), slice(None), mine, batch)
    expected = layer(ReferenceOps(), slice(None), theirs, batch)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-3)
    torch.testing.assert_close(mine.memory, theirs.memory, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "shape", "form"), SMALL, ids=str)
def test_parts_and_company_change_no_bit(kind: str, shape: tuple[int, ...], form: dict) -> None:
    ops, count = CudaOps(), 6
    layer, state = make(kind, shape, form, count)

    def on_device(rows: slice | list[int], states: RecurrentState, batch: StateBatch) -> Tensor:
        return layer(ops, rows, states, to_device(batch, DEVICE))

    check_parts(on_device, state, 1, ((2, 4), (1,) * count, (3, 2, 1)))


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
