"""Protects adapters that act together on the same rows, with scales: each kernel adds what each of them adds,
of any rank and encoding, for tokens, prompts and experts, and a row has the same bits in any company."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from levels import PARAMS, open_library
from test_cuda_kernels import DEVICE, attention_batch
from test_cuda_kernels import ops as cuda_ops
from test_expert_kernels import EXPERTS, LAYER
from test_expert_kernels import TARGETS as EXPERT_TARGETS
from test_float8_kernels import IN, TARGETS, WIDTHS, check, expert_ops, mixed_batch

from manylora.kernels.compiled import CompiledOps
from manylora.kernels.cpu import CpuOps
from manylora.kernels.experts import pair_up
from manylora.kernels.reference import ReferenceOps
from manylora.kernels.spec import LoraBatch, LoraSegment
from manylora.kernels.transfer import to_device
from manylora.lora.loaded import LoadedAdapter

SCALES = (0.5, -1.25, 3.0, 1.0)
MEMBERS = ((0, 1), (2,), (1, 3, 0, 2), (3,))  # of the adapters of a batch, for the rows of its segments
SHAPES = [([1, 1, 1, 1], [5, 64, 16, 3]), ([1, 7, 3, 2], [16, 33, 4, 8]), ([20, 1, 70, 9], [8, 80, 17, 40])]


def mixes(batch: LoraBatch, last_plain: bool = True) -> tuple[LoraBatch, list[tuple[int, int, int, float]]]:
    """The same rows under mixes; and what acts on them one after the other: start, stop, adapter, scale."""
    loaded = [LoadedAdapter(dict(segment.rows), {}) for segment in batch.segments]
    segments, single = [], []
    for place, (segment, chosen) in enumerate(zip(batch.segments, MEMBERS, strict=True)):
        plain = last_plain and place == len(MEMBERS) - 1
        members = [(n, 1.0 if plain else SCALES[n]) for n in chosen]
        rows = LoadedAdapter.mixed([(loaded[n], scale) for n, scale in members]).rows
        segments.append(LoraSegment(segment.start, segment.stop, rows))
        single += [(segment.start, segment.stop, n, scale) for n, scale in members]
    return replace(batch, segments=tuple(segments)), single


def expected(y: torch.Tensor, x: torch.Tensor, wide: LoraBatch, single: list) -> torch.Tensor:
    want = y.double()
    for start, stop, number, scale in single:
        delta = torch.zeros_like(want)
        segment = LoraSegment(start, stop, wide.segments[number].rows)
        ReferenceOps().lora_add(delta, x.double(), replace(wide, segments=(segment,)), 2, TARGETS)
        want += scale * delta
    return want


@pytest.mark.parametrize(
    ("dtype", "pool"),
    [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)],
)
@pytest.mark.parametrize(("lengths", "ranks"), SHAPES)
def test_a_cpu_adds_what_each_member_adds(
    ops: CpuOps, lengths: list[int], ranks: list[int], dtype: torch.dtype, pool: torch.dtype
) -> None:
    torch.manual_seed(0)
    batch, wide = mixed_batch(lengths, ranks, pool, TARGETS, 2)
    batch, wide = (replace(one, pool=one.pool.cpu()) for one in (batch, wide))
    mixed, single = mixes(batch)
    total = sum(lengths) + len(lengths) + 1
    x, y = torch.randn(total, 2 * IN).to(dtype)[:, IN:], torch.randn(total, sum(WIDTHS)).to(dtype)
    want = expected(y, x, wide, single)
    for made in (ops, ReferenceOps()):
        got = y.clone()
        made.lora_add(got, x, mixed, 2, TARGETS)
        check(got, want)
        spare = [0, *(segment.stop for segment in batch.segments)]
        assert torch.equal(got[spare], y[spare]), "a base row was touched"
        if made is ops and dtype == torch.float32:
            for segment in mixed.segments:
                alone = y.clone()
                made.lora_add(alone, x, replace(mixed, segments=(segment,)), 2, TARGETS)
                rows = slice(segment.start, segment.stop)
                assert torch.equal(alone[rows], got[rows])


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("pool", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[1, 2, 3, 1], [9, 5, 8, 4]])
@pytest.mark.parametrize("level", PARAMS)  # torch promises no order of sums
def test_a_row_has_the_same_bits_with_any_number_of_threads(
    level: str, lengths: list[int], pool: torch.dtype, threads: Callable[[int], None]
) -> None:
    """Few tasks are shared by all threads, coefficient by coefficient and column by column."""
    ops = CompiledOps(open_library(level))
    torch.manual_seed(0)
    batch, _ = mixed_batch(lengths, [8, 80, 17, 40], pool, TARGETS, 2)
    mixed = mixes(replace(batch, pool=batch.pool.cpu()))[0]
    total = sum(lengths) + len(lengths) + 1
    x, y = torch.randn(total, 2 * IN)[:, IN:], torch.randn(total, sum(WIDTHS))
    made: list[torch.Tensor] = []
    for count in (1, 2, 5):
        threads(count)
        made.append(y.clone())
        for segment in mixed.segments:  # alone it is few tasks
            ops.lora_add(made[-1], x, replace(mixed, segments=(segment,)), 2, TARGETS)
    together = y.clone()
    ops.lora_add(together, x, mixed, 2, TARGETS)
    assert all(torch.equal(together, alone) for alone in made)


@pytest.mark.parametrize(
    ("lengths", "ranks", "dtype"),
    [
        ([1, 1, 1, 1], [5, 35, 16, 3], torch.float32),
        ([1, 17, 3, 2], [16, 33, 4, 8], torch.bfloat16),
        pytest.param([1, 1, 1, 1], [5, 35, 16, 3], torch.bfloat16, marks=pytest.mark.extended),
        pytest.param([1, 17, 3, 2], [16, 33, 4, 8], torch.float32, marks=pytest.mark.extended),
    ],
)
def test_a_gpu_adds_what_each_member_adds(lengths: list[int], ranks: list[int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    made = cuda_ops(dtype)
    batch, wide = mixed_batch(lengths, ranks, dtype, TARGETS, 2)
    mixed, single = mixes(batch)
    total = sum(lengths) + len(lengths) + 1
    x = (torch.randn(total, 2 * IN) / 7).to(dtype).to(DEVICE)[:, IN:]
    y = torch.randn(total, sum(WIDTHS)).to(dtype).to(DEVICE)
    rows = attention_batch([1] * total, [1] * total)
    got = y.clone()
    made.lora_add(got, x, to_device(made.plan(rows, mixed)[1], DEVICE), 2, TARGETS)
    check(got, expected(y, x, wide, single))
    plain = replace(mixed, segments=mixed.segments[-1:])
    alone, beside = y.clone(), y.clone()
    made.lora_add(alone, x, to_device(made.plan(rows, plain)[1], DEVICE), 2, TARGETS)
    last = slice(plain.segments[0].start, plain.segments[0].stop)
    both = replace(mixed, segments=(mixed.segments[0], plain.segments[0]))
    if max(lengths) == 1:  # tiles of one size
        made.lora_add(beside, x, to_device(made.plan(rows, both)[1], DEVICE), 2, TARGETS)
        assert torch.equal(alone[last], beside[last]), "a mix beside it changed a row"


@pytest.mark.parametrize("kind", ["torch", *PARAMS, "gpu"])
def test_experts_add_what_each_member_adds(kind: str) -> None:
    torch.manual_seed(1)
    lengths = [3, 1, 12, 2]
    batch, wide = mixed_batch(lengths, [8, 3, 40, 5], torch.float32, EXPERT_TARGETS, LAYER, EXPERTS)
    mixed, single = mixes(batch)
    total = sum(lengths) + len(lengths) + 1
    choices = torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(total)])
    x, y = torch.randn(2 * total, IN) / 7, torch.randn(2 * total, 56)
    want, wide = y.double(), replace(wide, pool=wide.pool.cpu())
    for start, stop, number, scale in single:
        segment = replace(wide.segments[number], start=start, stop=stop)
        one = replace(wide, segments=(segment,))
        delta = torch.zeros_like(want)
        ReferenceOps().expert_lora_add(
            delta, x.double(), one, pair_up(choices, EXPERTS, one)[0], LAYER, EXPERT_TARGETS
        )
        want += scale * delta
    got, planned, made = y.clone(), replace(mixed, pool=mixed.pool.cpu()), expert_ops(kind)
    if kind == "gpu":
        got, x, choices = got.to(DEVICE), x.to(DEVICE), choices.to(DEVICE)
        planned = to_device(made.plan(attention_batch([1] * total, [1] * total), mixed)[1], DEVICE)
    pairs, _ = made.pair_up(choices, EXPERTS, planned)
    made.expert_lora_add(got, x, planned, pairs, LAYER, EXPERT_TARGETS)
    check(got.cpu(), want)
