"""Protects adapters that lie in the pool as 8-bit floats beside others in its own type: all devices' kernels
give what the numbers mean, scaled by the row's own scale, for any rank, tokens and prompts, and experts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from levels import PARAMS, open_library
from test_cuda_kernels import DEVICE, attention_batch
from test_cuda_kernels import ops as cuda_ops
from test_expert_kernels import EXPERTS, LAYER
from test_expert_kernels import TARGETS as EXPERT_TARGETS

from manylora.kernels.compiled import CompiledOps
from manylora.kernels.cpu import CpuOps
from manylora.kernels.cuda.ops import CudaOps
from manylora.kernels.experts import pair_up
from manylora.kernels.reference import ReferenceOps
from manylora.kernels.row_format import Encoding, RowFormat
from manylora.kernels.spec import FP8, LoraBatch, LoraRow, LoraSegment, LoraTarget
from manylora.kernels.transfer import to_device

IN, WIDTHS = 48, (32, 16, 80)
# Three parts side by side, and a fused module over the first two of them.
TARGETS = (LoraTarget(0, 0, 48), *(LoraTarget(m + 1, sum(WIDTHS[:m]), w) for m, w in enumerate(WIDTHS)))
LIMIT = 2e-5, 0.02  # of the largest number: float32, bfloat16
EVERY_CODE = torch.arange(256, dtype=torch.uint8).view(FP8)
SHAPES = [
    ([1], [1]),
    ([1, 1, 1, 1], [5, 64, 16, 3]),
    ([1, 7, 3, 2], [16, 33, 4, 8]),
    ([20, 1, 70], [8, 512, 17]),
]


def codes(count: int) -> torch.Tensor:
    """Of every size, subnormal ones and zeros of either sign too."""
    return (torch.randn(count) * torch.tensor([1.0, 0.05, 0.002])[torch.arange(count) % 3]).to(FP8)


def mixed_batch(
    lengths: list[int],
    ranks: list[int],
    pool: torch.dtype,
    targets: tuple[LoraTarget, ...],
    layer: int,
    pieces: int = 1,
) -> tuple[LoraBatch, LoraBatch]:
    """Adapters in turn in 8 bits and in the pool's type, a base row before each; the same in float64."""
    step = 8
    stored, wide, narrow_segments, wide_segments, start = [], [], [], [], 1
    used = 0
    for number, (length, rank) in enumerate(zip(lengths, ranks, strict=True)):
        float8, rows, wide_rows = number % 2 == 0, {}, {}
        for target in targets[number % 2 :]:
            size = pieces * rank * (IN + target.width)
            scale = (0.37, -2.0, 8.0)[number % 3] if float8 else 1.0
            values = codes(size) if float8 else torch.randn(size).to(pool)
            room = -(-size * values.itemsize // pool.itemsize)
            room += -room % step
            element = torch.full((room * pool.itemsize,), 0x7F, dtype=torch.uint8)  # NaN in every type
            element[: size * values.itemsize] = values.view(torch.uint8)
            place = used * pool.itemsize if float8 else used
            row = RowFormat(rank, encoding=Encoding(float8), scale=scale)
            rows[layer, target.module_id] = LoraRow(place, row)
            a_size = rank * IN
            exact = values.double().view(pieces, -1).clone()
            exact[:, :a_size] *= scale
            wide_rows[layer, target.module_id] = LoraRow(sum(map(len, wide)), RowFormat(rank))
            stored.append(element)
            wide.append(exact.flatten())
            used += room
        narrow_segments.append(LoraSegment(start, start + length, rows))
        wide_segments.append(LoraSegment(start, start + length, wide_rows))
        start += length + 1
    flat = torch.cat(stored).view(pool).to(DEVICE)
    return (
        LoraBatch(flat, tuple(narrow_segments), alignment=step),
        LoraBatch(torch.cat(wide).to(DEVICE), tuple(wide_segments)),
    )


def check(got: torch.Tensor, want: torch.Tensor) -> None:
    error = (got.double() - want).abs().max() / want.abs().max()
    assert error < LIMIT[got.dtype == torch.bfloat16], error


@pytest.mark.parametrize(
    ("dtype", "pool"),
    [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)],
)
@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize(("lengths", "ranks"), SHAPES)
def test_a_cpu_adds_what_the_numbers_mean(
    ops: CpuOps, lengths: list[int], ranks: list[int], apart: bool, dtype: torch.dtype, pool: torch.dtype
) -> None:
    torch.manual_seed(0)
    targets = TARGETS[1:] if apart else TARGETS  # the compiled kernels leave fused ones beside parts to torch
    batch, wide = mixed_batch(lengths, ranks, pool, targets, 5)
    total = sum(lengths) + len(lengths) + 1
    x = torch.randn(total, 2 * IN).to(dtype)[:, IN:]
    y = torch.randn(total, sum(WIDTHS)).to(dtype)
    want = y.double()
    ReferenceOps().lora_add(want, x.double(), replace(wide, pool=wide.pool.cpu()), 5, targets)
    batch = replace(batch, pool=batch.pool.cpu())
    for made in (ops, ReferenceOps()):
        got = y.clone()
        made.lora_add(got, x, batch, 5, targets)
        check(got, want)
        spare = [0, *(segment.stop for segment in batch.segments)]
        assert torch.equal(got[spare], y[spare]), "a base row was touched"


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.extended)]
)
@pytest.mark.parametrize(("lengths", "ranks"), SHAPES)
def test_a_gpu_adds_what_the_numbers_mean(lengths: list[int], ranks: list[int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    made = cuda_ops(dtype)
    batch, wide = mixed_batch(lengths, ranks, dtype, TARGETS, 2)
    total = sum(lengths) + len(lengths) + 1
    x = (torch.randn(total, 2 * IN) / 7).to(dtype).to(DEVICE)[:, IN:]
    y = torch.randn(total, sum(WIDTHS)).to(dtype).to(DEVICE)
    planned = to_device(made.plan(attention_batch([1] * total, [1] * total), batch)[1], DEVICE)
    want, got = y.double(), y.clone()
    ReferenceOps().lora_add(want, x.double(), wide, 2, TARGETS)
    made.lora_add(got, x, planned, 2, TARGETS)
    check(got if dtype != torch.float16 else got.to(torch.bfloat16), want)
    spare = [0, *(segment.stop for segment in batch.segments)]
    assert torch.equal(got[spare], y[spare]), "a base row was touched"


def test_a_batch_without_them_runs_the_kernels_that_know_none() -> None:
    """The shape of a planned batch is the key of its graph."""
    made = cuda_ops()
    mixed, _ = mixed_batch([1, 1], [4, 4], torch.float32, TARGETS, 2)
    plain = replace(mixed, segments=mixed.segments[1:])
    shapes = []
    for batch in (mixed, plain):
        planned = made.plan(attention_batch([1] * 5, [1] * 5), batch)[1]
        assert planned is not None
        shapes.append(planned.shape)
        assert planned.kinds.encodings == ({Encoding.FLOAT8} if batch is mixed else set())
    assert shapes[0] != shapes[1]


@pytest.mark.parametrize("kind", ["torch", *PARAMS, "gpu"])
@pytest.mark.parametrize(("lengths", "ranks"), [([1, 1], [4, 7]), ([3, 1, 12], [8, 3, 40])])
def test_experts_add_what_the_numbers_mean(kind: str, lengths: list[int], ranks: list[int]) -> None:
    torch.manual_seed(1)
    made = expert_ops(kind)
    batch, wide = mixed_batch(lengths, ranks, torch.float32, EXPERT_TARGETS, LAYER, EXPERTS)
    total = sum(lengths) + len(lengths) + 1
    device = DEVICE if kind == "gpu" else torch.device("cpu")
    batch, wide = (replace(one, pool=one.pool.to(device)) for one in (batch, wide))
    choices = torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(total)]).to(device)
    x, y = torch.randn(2 * total, IN, device=device) / 7, torch.randn(2 * total, 56, device=device)
    pairs, _ = pair_up(choices, EXPERTS, batch)
    want = y.double()
    ReferenceOps().expert_lora_add(want, x.double(), wide, pairs, LAYER, EXPERT_TARGETS)
    got = y.clone()
    if not isinstance(made, CudaOps):
        made.expert_lora_add(got, x, batch, pairs, LAYER, EXPERT_TARGETS)
    else:
        planned = to_device(made.plan(attention_batch([1] * total, [1] * total), batch)[1], DEVICE)
        device_pairs, _ = made.pair_up(choices, EXPERTS, planned)
        made.expert_lora_add(got, x, planned, device_pairs, LAYER, EXPERT_TARGETS)
    check(got, want)
    assert not torch.equal(got, y)


def expert_ops(kind: str) -> ReferenceOps:
    """Of torch, of a level of instruction sets, or of the GPU."""
    from test_cuda_experts import ops

    if kind == "gpu":
        return ops()
    return CpuOps() if kind == "torch" else CompiledOps(open_library(kind))


def pool_of(parts: list[torch.Tensor], pool: torch.dtype) -> torch.Tensor:
    """8-bit floats side by side, as a pool of a wider type holds them."""
    stored = torch.cat(parts).view(torch.uint8)
    return torch.nn.functional.pad(stored, (0, -len(stored) % 4)).view(pool)


@pytest.mark.parametrize("pool", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [254, 37])
def test_every_number_is_widened_exactly(ops: CpuOps, count: int, pool: torch.dtype) -> None:
    """Through A one by one, and through B, in vectors and in what is left over from them."""
    numbers, one = EVERY_CODE[~EVERY_CODE.float().isnan()], torch.ones(1).to(FP8)
    for first in range(0, len(numbers), count):
        part = numbers[first : first + count]
        size = len(part)
        y = torch.zeros(size, 1)
        rows = {(0, 0): LoraRow(0, RowFormat(1, encoding=Encoding.FLOAT8))}
        batch = LoraBatch(pool_of([part, one], pool), (LoraSegment(0, size, rows),))
        ops.lora_add(y, torch.eye(size), batch, 0, (LoraTarget(0, 0, 1),))
        assert torch.equal(y[:, 0], part.float())
        y = torch.zeros(1, size)
        rows = {(0, 0): LoraRow(0, RowFormat(1, encoding=Encoding.FLOAT8, scale=0.5))}
        batch = LoraBatch(pool_of([one, part], pool), (LoraSegment(0, 1, rows),))
        ops.lora_add(y, torch.full((1, 1), 3.0), batch, 0, (LoraTarget(0, 0, size),))
        assert torch.equal(y[0], 1.5 * part.float())
