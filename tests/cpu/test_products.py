"""Protects products of bfloat16: sums in the order that docs/hardware.md says, in any company, by
instructions emulated where there are none; these are chosen only where they are right; models compute with
them, and so do adapters, with the same bits in any company."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from levels import SIMULATED, open_library, open_products
from selection import extended
from torch import Tensor

from manylora import LLM, QuantConfig, SamplingParams
from manylora.kernels import compiled as compiled_ops
from manylora.kernels import native
from manylora.kernels.compiled import FORMS, NONE, CompiledOps, choose_form
from manylora.kernels.panels import PanelsLinear, to_panels
from manylora.kernels.quantised import QuantisedWeight
from manylora.kernels.reference import ReferenceOps
from manylora.kernels.row_format import RowFormat
from manylora.kernels.spec import LoraBatch, LoraRow, LoraSegment, LoraTarget
from manylora.system.compiler import read_features

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo"
PROMPT = "Where is the capital of Egypt? \\nAnswer:"
DOTS, _ = FORMS


@pytest.fixture(params=["emulated", *extended(SIMULATED)])
def multiply(request: pytest.FixtureRequest) -> PanelsLinear:
    """For panels of this processor's width, and of AVX-512's."""
    return PanelsLinear(open_products() if request.param == "emulated" else open_library(request.param))


def weights(kind: str, rows: int, columns: int) -> Tensor | QuantisedWeight:
    if kind == "bfloat16":
        return torch.randn(rows, columns).bfloat16()
    groups = 1 if kind == "int8" else columns // 4
    scales, offsets = torch.rand(rows, groups), torch.randn(rows, groups)
    if kind == "int4":
        values = torch.randint(0, 256, (rows, columns // 2)).to(torch.uint8)
        return QuantisedWeight(values, torch.rand(rows, columns // 32), torch.randn(rows, columns // 32))
    values = torch.randint(-128, 128, (rows, columns)).to(torch.int8)
    return QuantisedWeight(values, scales, offsets if kind == "int8 in groups" else None)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int8 in groups", "int4"])
@pytest.mark.parametrize(("rows", "columns"), [(53, 128), (20, 224), (7, 1056), (101, 2336)])
def test_products_are_those_of_rounded_inputs_in_any_company(
    multiply: PanelsLinear, rows: int, columns: int, kind: str, form: int
) -> None:
    torch.manual_seed(columns)
    weight, x, bias = weights(kind, rows, columns), torch.randn(41, columns), torch.randn(rows)
    packed = to_panels(weight, multiply.width, multiply.block)
    assert packed is not None
    made = packed.rounding(form)
    assert made.form == form and made.values is packed.values
    wide = weight if isinstance(weight, Tensor) else weight.to(torch.float64).wide()
    want = x.bfloat16().double() @ wide.double().T + bias
    found = multiply(x, made, bias)
    torch.testing.assert_close(found.double(), want, rtol=0, atol=2e-6 * float(want.abs().max()))
    assert not torch.equal(found, multiply(x, packed, bias)), "nothing was rounded"
    for start, stop in ((0, 1), (0, 5), (3, 11), (0, 9), (20, 36), (24, 41), (40, 41)):
        assert torch.equal(multiply(x[start:stop], made, bias), found[start:stop]), (start, stop)


def flush(value: Tensor) -> Tensor:
    return torch.where(value.abs() < 2**-126, 0.0, value)


def fused(a: Tensor, b: Tensor, total: Tensor) -> Tensor:
    """a [T], b [N]: exact in float64, as both have 8 bits."""
    return flush((flush(a)[:, None].double() * flush(b).double() + total.double()).float())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("columns", [160, 174])
def test_sums_have_the_order_of_the_instructions(multiply: PanelsLinear, columns: int, form: int) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(30, columns).bfloat16(), torch.randn(6, columns)
    x[1] *= 1e-37  # sums and products that are flushed
    x[2] *= 1e-38
    packed = to_panels(weight, multiply.width, multiply.block)
    assert packed is not None
    found = multiply(x, packed.rounding(form), None)
    a, b, total = x.bfloat16().float(), weight.float(), torch.zeros(6, 30)
    if form == DOTS:
        for k in range(0, columns, 2):
            for one in (k + 1, k):
                total = fused(a[:, one], b[:, one], total)
    else:
        for start in range(0, columns, 32):
            even, odd = torch.zeros(2, 6, 30)
            for k in range(start, min(columns, start + 32), 2):
                even, odd = fused(a[:, k], b[:, k], even), fused(a[:, k + 1], b[:, k + 1], odd)
            total = flush(total + flush(even + odd))
    assert torch.equal(found, total)
    assert not found[2].any() or found[1].any(), "nothing was flushed"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_so_in_its_row_only(multiply: PanelsLinear, value: float, form: int) -> None:
    packed = to_panels(torch.randn(40, 192).bfloat16(), multiply.width, multiply.block)
    assert packed is not None
    made, x = packed.rounding(form), torch.randn(18, 192)
    whole = multiply(x, made, None)
    x[17, 40] = value
    if value != value:
        x.view(torch.int32)[17, 40] = 0x7FFFFFFF  # which plain rounding would make a zero
    found = multiply(x, made, None)
    assert not torch.isfinite(found[17]).any() and torch.equal(found[:17], whole[:17])


class Offering:
    """A library that says it has all forms; form `wrong` gives other answers."""

    def __init__(self, library: Any, wrong: int = NONE) -> None:
        self._library, self._wrong = library, wrong

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def bfloat16_forms(self) -> int:
        return sum(1 << form for form in FORMS)

    def linear_layer(self, kind: int, *others: Any) -> None:
        self._library.linear_layer(kind % 16 if kind // 16 == self._wrong else kind, *others)


@pytest.mark.parametrize("wrong", [NONE, *FORMS])
def test_only_a_form_with_the_right_answers_is_tried(
    wrong: int, emulated: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A form that does not round is as wrong as one that rounds badly."""
    tried: list[int] = []
    monkeypatch.setattr(compiled_ops, "fastest", lambda multiply, forms: tried.extend(forms) or forms[-1])
    with caplog.at_level(logging.INFO, "manylora"):
        chosen = choose_form(Offering(emulated, wrong))
    assert tried == [NONE, *(form for form in FORMS if form != wrong)] and chosen == tried[-1]
    assert FORMS[chosen] in caplog.text


@pytest.fixture(params=[NONE, *FORMS])
def processor(request: pytest.FixtureRequest, emulated: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """A form, which this process's processor has meanwhile."""
    for name in ("load", "loaded"):
        monkeypatch.setattr(native, name, lambda: emulated)
    monkeypatch.setattr(compiled_ops, "choose_form", lambda library: request.param)
    return int(request.param)


def context_logits(dtype: str, prompts: list[str], algo: str | None = None) -> list[Tensor]:
    quant = QuantConfig(algo) if algo else None
    params = SamplingParams(max_tokens=2, return_context_logits=True)
    with LLM(DEMO / "base", device="cpu", dtype=dtype, quant_config=quant) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return [torch.from_numpy(one.context_logits) for one in outputs]


@pytest.mark.parametrize("algo", [None, "W8A16", "W4A16"])
def test_a_model_rounds_what_its_linear_layers_read(processor: int, algo: str | None) -> None:
    """Its answers are nearly those of float32, where nothing is rounded, and the same in company."""
    exact, whole = (context_logits(dtype, [PROMPT], algo)[0] for dtype in ("float32", "bfloat16"))
    largest, distance = float(exact.abs().max()), float((whole - exact).abs().max())
    assert 1e-5 * largest < distance < 0.05 * largest
    if processor == NONE:
        return  # torch computes in bfloat16
    together = context_logits("bfloat16", ["Hello", PROMPT, PROMPT + " Cairo"], algo)
    assert torch.equal(together[1], whole)


def test_float32_is_exact_on_every_processor(processor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = context_logits("float32", [PROMPT])[0]
    monkeypatch.setattr(compiled_ops, "choose_form", lambda library: NONE)
    assert torch.equal(found, context_logits("float32", [PROMPT])[0])


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
