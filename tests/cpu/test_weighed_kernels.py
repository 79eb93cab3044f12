"""Protects rows that weigh what they add: those that share A and B and have vectors of their own, and DoRA in
a mix, on every kernel, beside other rows, whose bits they do not change."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_cuda_kernels import DEVICE, attention_batch
from test_cuda_kernels import ops as cuda_ops
from test_float8_kernels import IN, TARGETS, WIDTHS, check

from manylora.kernels.cpu import CpuOps
from manylora.kernels.reference import ReferenceOps
from manylora.kernels.row_format import RowFormat
from manylora.kernels.spec import LoraBatch, LoraRow, LoraSegment
from manylora.kernels.transfer import to_device
from manylora.lora.loaded import LoadedAdapter

LAYER, STEP, SHARED_RANK = 2, 8, 21
KINDS = ("shared", "dora", "plain", "shared")  # of the adapters
# (adapter, scale) that act on the rows of each segment.
ACTING = (
    ((0, 1.0),),
    ((1, 0.5), (2, -1.5), (0, 2.0)),
    ((1, 1.0),),
    ((2, 1.0),),
    ((1, -0.75),),
    ((3, 0.5), (1, 1.0)),
)


class Pool:
    def __init__(self, dtype: torch.dtype) -> None:
        self._pieces, self._dtype, self.used = [torch.full((STEP,), float("nan"))], dtype, STEP

    def put(self, *parts: torch.Tensor) -> int:
        values = torch.cat([part.flatten() for part in parts])
        first, pad = self.used, -len(values) % STEP + STEP
        self._pieces += [values, torch.full((pad,), float("nan"))]
        self.used += len(values) + pad
        return first

    @property
    def flat(self) -> torch.Tensor:
        return torch.cat(self._pieces).to(self._dtype)


def make(dtype: torch.dtype, lengths: list[int]) -> tuple[LoraBatch, list[dict]]:
    """A batch with a base row before each segment, and each adapter's numbers by target, in float64."""
    pool = Pool(dtype)
    draw = lambda *shape: torch.randn(*shape).to(dtype)  # noqa: E731
    common = {t.module_id: (draw(SHARED_RANK, IN) / 5, draw(SHARED_RANK, t.width) / 5) for t in TARGETS}
    places = {module: pool.put(a.float(), b.float()) for module, (a, b) in common.items()}
    adapters, numbers = [], []
    for number, kind in enumerate(KINDS):
        rows, values, rank = {}, {}, 3 + 16 * number
        for target in TARGETS[number % 2 :]:
            module = target.module_id
            if kind == "shared":
                b, d = draw(target.width), draw(SHARED_RANK)
                vectors = pool.put(b.float(), d.float())
                row = LoraRow(places[module], RowFormat(SHARED_RANK, shared=True), vectors=vectors)
                values[module] = (*common[module], d, b, None)
            else:
                a, b = draw(rank, IN) / 5, draw(rank, target.width) / 5
                m = draw(target.width) if kind == "dora" else None
                first = pool.put(*(part.float() for part in (a, b, m) if part is not None))
                row = LoraRow(first, RowFormat(rank, kind == "dora"))
                values[module] = (a, b, None, None, m)
            rows[LAYER, module] = row
        adapters.append(LoadedAdapter(rows, {}))
        numbers.append({m: tuple(p if p is None else p.double() for p in v) for m, v in values.items()})
    segments, start = [], 1
    for length, members in zip(lengths, ACTING, strict=True):
        alone = len(members) == 1 and members[0][1] == 1
        acting = [(adapters[n], scale) for n, scale in members]
        rows = adapters[members[0][0]].rows if alone else LoadedAdapter.mixed(acting).rows
        segments.append(LoraSegment(start, start + length, rows))
        start += length + 1
    return LoraBatch(pool.flat, tuple(segments), alignment=STEP), numbers


def expected(
    y: torch.Tensor, x: torch.Tensor, bias: torch.Tensor, batch: LoraBatch, numbers: list[dict]
) -> torch.Tensor:
    """The base, and the change that each adapter makes of it alone, times its scale."""
    want, x, bias = y.double(), x.double(), bias.double()
    for segment, members in zip(batch.segments, ACTING, strict=True):
        rows = slice(segment.start, segment.stop)
        for target in TARGETS:
            columns = slice(target.start, target.start + target.width)
            base, shift = want[rows, columns].clone(), bias[columns]
            for number, scale in members:
                if target.module_id not in numbers[number]:
                    continue
                a, b, d, weights, magnitude = numbers[number][target.module_id]
                low = x[rows] @ a.T
                change = (low if d is None else low * d) @ b * (1 if weights is None else weights)
                if magnitude is not None:
                    change = (base - shift + change) * magnitude + shift - base
                want[rows, columns] += scale * change
    return want


@pytest.mark.parametrize("pool", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[1, 1, 1, 1, 1, 1], [2, 9, 1, 3, 1, 20]])
def test_a_cpu_adds_the_change_of_each(ops: CpuOps, lengths: list[int], pool: torch.dtype) -> None:
    torch.manual_seed(0)
    batch, numbers = make(pool, lengths)
    total = sum(lengths) + len(lengths) + 1
    x, y, bias = torch.randn(total, IN), torch.randn(total, sum(WIDTHS)), torch.randn(sum(WIDTHS))
    want = expected(y, x, bias, batch, numbers)
    for made in (ops, ReferenceOps()):
        got = y.clone()
        made.lora_add(got, x, batch, LAYER, TARGETS, bias)
        check(got, want)
        spare = [0, *(segment.stop for segment in batch.segments)]
        assert torch.equal(got[spare], y[spare]), "a base row was touched"
        if made is ops and type(ops) is not CpuOps:
            for segment in batch.segments:
                alone, rows = y.clone(), slice(segment.start, segment.stop)
                made.lora_add(alone, x, replace(batch, segments=(segment,)), LAYER, TARGETS, bias)
                assert torch.equal(alone[rows], got[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[1, 1, 1, 1, 1, 1], [2, 9, 1, 3, 1, 20]])
def test_a_gpu_adds_the_change_of_each(lengths: list[int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    made, (batch, numbers) = cuda_ops(dtype), make(dtype, lengths)
    batch = replace(batch, pool=batch.pool.to(DEVICE))
    total = sum(lengths) + len(lengths) + 1
    x = (torch.randn(total, IN) / 3).to(dtype).to(DEVICE)
    y, bias = (torch.randn(*s, sum(WIDTHS)).to(dtype).to(DEVICE) for s in ((total,), ()))
    rows = attention_batch([1] * total, [1] * total)
    got = y.clone()
    made.lora_add(got, x, to_device(made.plan(rows, batch)[1], DEVICE), LAYER, TARGETS, bias)
    check(got.cpu(), expected(y.cpu(), x.cpu(), bias.cpu(), batch, numbers))
    if max(lengths) == 1:  # tiles of one size
        for segment in batch.segments[2:4]:
            alone = y.clone()
            planned = to_device(made.plan(rows, replace(batch, segments=(segment,)))[1], DEVICE)
            made.lora_add(alone, x, planned, LAYER, TARGETS, bias)
            row = slice(segment.start, segment.stop)
            assert torch.equal(alone[row], got[row]), "a weighed row beside it changed a row"
