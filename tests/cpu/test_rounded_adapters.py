"""Protects adapters whose inputs are rounded to bfloat16 as the linear layer's are: right within the layer's
own error, the same bits in any company and in the step as one call, and nothing rounded elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from levels import SIMULATED, open_library
from selection import extended
from torch import Tensor

from manylora.kernels import compiled as compiled_ops
from manylora.kernels import native
from manylora.kernels.compiled import DOTS, CompiledOps
from manylora.kernels.reference import ReferenceOps
from manylora.kernels.row_format import RowFormat
from manylora.kernels.spec import LoraBatch, LoraRow, LoraSegment, LoraTarget
from manylora.system.compiler import read_features

WIDTHS = (40, 64, 133)
TARGETS = tuple(LoraTarget(m, sum(WIDTHS[:m]), width) for m, width in enumerate(WIDTHS))
# Where the processor has none a case of it is skipped, and may be the only one that was selected for a value.
PROCESSOR = ["processor"] if "avx512_bf16" in read_features() else extended("processor")


@pytest.fixture(params=["emulated", *PROCESSOR, *extended(SIMULATED)])
def ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CompiledOps:
    """In plain C, for vectors of this processor's width and of AVX-512's, and by the instruction itself."""
    if request.param == "processor":
        library = native.load()
        if library is None or not library.bfloat16_forms() >> DOTS & 1:
            pytest.skip("this processor has no AVX512-BF16")
    else:
        emulated = request.param == "emulated"
        library = request.getfixturevalue("emulated") if emulated else open_library(request.param)
    monkeypatch.setattr(compiled_ops, "choose_form", lambda library: DOTS)
    made = CompiledOps(library)
    assert made.compute_in(torch.bfloat16) == torch.float32 and made.rounds_inputs
    return made


def make_batch(inputs: int, lengths: list[int], ranks: list[int], dora: bool = False) -> LoraBatch:
    """A segment of so many rows for each rank, a row of the base before each."""
    segments, used, start = [], 0, 1
    for length, rank in zip(lengths, ranks, strict=True):
        rows = {}
        for target in TARGETS:
            kind = RowFormat(rank, dora=dora)
            rows[0, target.module_id] = LoraRow(used, kind)
            used += rank * (inputs + target.width) + dora * target.width
        segments.append(LoraSegment(start, start + length, rows))
        start += length + 1
    return LoraBatch(torch.randn(used).bfloat16(), tuple(segments))


def apply(ops: Any, batch: LoraBatch, x: Tensor, y: Tensor) -> Tensor:
    found = y.clone()
    ops.lora_add(found, x, batch, 0, TARGETS)
    return found


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("inputs", [128, 320, 1034])
def test_they_are_as_exact_as_rounded_inputs_are(ops: CompiledOps, inputs: int, dora: bool) -> None:
    torch.manual_seed(inputs)
    batch = make_batch(inputs, [1, 2, 5, 19, 90], [1, 3, 8, 16, 37], dora)
    rows = batch.segments[-1].stop + 1
    x, y = torch.randn(rows, inputs), torch.randn(rows, sum(WIDTHS))
    wide = LoraBatch(batch.pool.double(), batch.segments)
    found = apply(ops, batch, x, y)
    rounded, exact = (apply(ReferenceOps(), wide, one.double(), y.double()) for one in (x.bfloat16(), x))
    largest = float(rounded.abs().max())
    torch.testing.assert_close(found.double(), rounded, rtol=0, atol=2e-6 * largest)
    # What rounding itself costs: half a unit of 8 bits for each input, as in the linear layer.
    error = float((found - exact).norm() / exact.norm())
    assert 1e-4 < error < 2**-8


@pytest.mark.parametrize("inputs", [128, 1034])
def test_a_row_has_the_same_bits_in_any_company(ops: CompiledOps, inputs: int) -> None:
    """Few rows and many, alone in a call, which threads then share, and at any place in a task; and of a rank
    so large that few rows' coefficients are kept at a time."""
    torch.manual_seed(inputs)
    batch = make_batch(inputs, [150, 40], [16, 600])
    x, y = torch.randn(194, inputs), torch.randn(194, sum(WIDTHS))
    whole = apply(ops, batch, x, y)
    for segment in batch.segments:
        for start, stop in ((0, 1), (0, 2), (3, 6), (1, 18), (5, 40), (39, 40)):
            rows = slice(segment.start + start, segment.start + stop)
            alone = LoraBatch(batch.pool, (LoraSegment(0, stop - start, segment.rows),))
            assert torch.equal(apply(ops, alone, x[rows], y[rows]), whole[rows]), (start, stop)
