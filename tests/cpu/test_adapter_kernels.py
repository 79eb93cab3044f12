"""Protects what rows of adapters mean, on every kernel: in 8 bits with a scale of their own, several acting
together with scales, with shared A and B and vectors of their own, with DoRA in a mix. For tokens, prompts
and experts, each row is added as its numbers say, base rows are left alone, and a row has the same bits in
any company. And routed experts: pairs are sorted, and each row meets the weights of its experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from levels import PARAMS, open_library
from test_cuda_kernels import DEVICE, attention_batch, close, limits
from test_cuda_kernels import ops as cuda_ops
from torch import Tensor

from manylora.adapters.cache.pool import LoadedAdapter, Mixes
from manylora.checkpoints.quant.config import QuantConfig
from manylora.kernels.compiled import CompiledOps
from manylora.kernels.cpu import CpuOps
from manylora.kernels.cuda.grouped import quantised_rows, weight_table
from manylora.kernels.cuda.ops import CudaOps
from manylora.kernels.lora import pair_up
from manylora.kernels.quantised import QuantisedWeight, quantised_linear
from manylora.kernels.reference import ReferenceOps
from manylora.kernels.row_format import Encoding, RowFormat
from manylora.kernels.spec import FP8, LoraBatch, LoraRow, LoraSegment, LoraTarget
from manylora.kernels.transfer import to_device
from manylora.model.quant import quantise

IN, WIDTHS, LAYER, STEP = 48, (32, 16, 80), 2, 8
# Three parts side by side, and a fused module over the first two of them.
TARGETS = (LoraTarget(0, 0, 48), *(LoraTarget(m + 1, sum(WIDTHS[:m]), w) for m, w in enumerate(WIDTHS)))
LIMIT = {torch.float32: 2e-5, torch.bfloat16: 0.02, torch.float16: 0.02}  # of the largest number
RANKS = (5, 64, 16, 3, 80, 33)
LENGTHS = [[1, 1, 1, 1, 1, 1], [2, 9, 1, 3, 1, 20], [20, 1, 70, 9, 1, 2]]
DTYPES = [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)]
KINDS = ["torch", *PARAMS, "gpu"]
EXPERTS, EXPERT_WIDTHS, EXPERT_LAYER = 5, (32, 24), 3
EXPERT_TARGETS = tuple(
    LoraTarget(13 + m, sum(EXPERT_WIDTHS[:m]), width) for m, width in enumerate(EXPERT_WIDTHS)
)
Acting = tuple[tuple[int, float], ...]
"""(adapter, scale) of those that act on the rows of a segment."""
SINGLE: tuple[Acting, ...] = tuple(((n, 1.0),) for n in range(6))
MIXES: tuple[Acting, ...] = (
    ((0, 0.5), (1, -1.25)),
    ((2, 3.0),),
    ((1, -1.25), (3, 1.0), (0, 0.5), (2, 3.0)),
    ((3, 1.0),),
    ((4, 0.5), (5, 2.0)),
    ((5, 1.0),),
)
WEIGHED: tuple[Acting, ...] = (
    ((0, 1.0),),
    ((1, 0.5), (2, -1.5), (0, 2.0)),
    ((1, 1.0),),
    ((2, 1.0),),
    ((1, -0.75),),
    ((3, 0.5), (1, 1.0)),
)
Expected = Callable[[Tensor, Tensor, Tensor], Tensor]
"""y [T, N], x [T, in] and bias [N] -> y with what the adapters add, float64."""


def expert_ops(dtype: torch.dtype = torch.float32) -> CudaOps:
    made = CudaOps()
    made.reserve(limits(dtype, num_experts=EXPERTS, num_layers=EXPERT_LAYER + 1), DEVICE)
    return made


def plan_rows(made: Any, batch: LoraBatch, rows: int) -> LoraBatch:
    """On the device, for single tokens."""
    return to_device(made.plan(attention_batch([1] * rows, [1] * rows), batch)[1], DEVICE)


class Pool:
    """NaNs lie between what is put in."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._pieces, self._dtype, self.used = list[Tensor](), dtype, 0

    def put(self, values: Tensor) -> int:
        """Returns the place of its first element of the pool's type."""
        first, stored = self.used, values.contiguous().flatten().view(torch.uint8)
        room = (len(stored) // self._dtype.itemsize // STEP + 2) * STEP
        filled = torch.full((room * self._dtype.itemsize,), 0x7F, dtype=torch.uint8)  # NaN in every type
        filled[: len(stored)] = stored
        self._pieces.append(filled)
        self.used += room
        return first

    @property
    def flat(self) -> Tensor:
        return torch.cat(self._pieces).view(self._dtype)


def segments_of(
    lengths: list[int], acting: tuple[Acting, ...], adapters: list[LoadedAdapter]
) -> tuple[LoraSegment, ...]:
    """With a base row before each."""
    segments, start = [], 1
    for length, members in zip(lengths, acting, strict=False):
        alone = len(members) == 1 and members[0][1] == 1
        mixed = adapters[members[0][0]] if alone else Mixes().find([(adapters[n], s) for n, s in members])
        segments.append(LoraSegment(start, start + length, mixed.rows))
        start += length + 1
    return tuple(segments)


def codes(count: int) -> Tensor:
    """8-bit floats of every size, subnormal ones and zeros of either sign too."""
    return (torch.randn(count) * torch.tensor([1.0, 0.05, 0.002])[torch.arange(count) % 3]).to(FP8)


def encoded(
    pool: torch.dtype, lengths: list[int], acting: tuple[Acting, ...],
    targets: tuple[LoraTarget, ...] = TARGETS, pieces: int = 1,
) -> tuple[LoraBatch, list[LoraBatch]]:  # fmt: skip
    """Adapters in turn in 8 bits and in the pool's type; and one batch in float64 for each that acts, whose
    deltas are to be added in this order. pieces: experts.
    """
    stored, wide = Pool(pool), Pool(torch.float64)
    adapters, exact = [], []
    for number, rank in enumerate(RANKS):
        float8, rows, wide_rows = number % 2 == 0, {}, {}
        for target in targets[number % 2 :]:
            size = pieces * rank * (IN + target.width)
            scale = (0.37, -2.0, 8.0)[number % 3] if float8 else 1.0
            values = codes(size) if float8 else torch.randn(size).to(pool)
            place = stored.put(values) * (pool.itemsize if float8 else 1)
            row = RowFormat(rank, encoding=Encoding(float8), scale=scale)
            rows[LAYER, target.module_id] = LoraRow(place, row)
            numbers = values.double().view(pieces, -1).clone()
            numbers[:, : rank * IN] *= scale
            wide_rows[LAYER, target.module_id] = LoraRow(wide.put(numbers), RowFormat(rank))
        adapters.append(LoadedAdapter(rows, {}))
        exact.append(wide_rows)
    batch = LoraBatch(stored.flat, segments_of(lengths, acting, adapters), alignment=STEP)
    single = []
    for segment, members in zip(batch.segments, acting, strict=False):
        for number, scale in members:
            pool64 = wide.flat.clone()
            for (_, module), row in exact[number].items():
                size = next(IN + t.width for t in targets if t.module_id == module) * row.format.rank
                part = pool64[row.offset : row.offset + pieces * size].view(pieces, -1)
                part[:, : row.format.rank * IN] *= scale
            single.append(LoraBatch(pool64, (replace(segment, rows=exact[number]),)))
    return batch, single


def float8_and_mixes(
    acting: tuple[Acting, ...], pool: torch.dtype, lengths: list[int]
) -> tuple[LoraBatch, Expected]:
    batch, single = encoded(pool, lengths, acting)

    def expected(y: Tensor, x: Tensor, bias: Tensor) -> Tensor:
        want = y.double()
        for one in single:
            ReferenceOps().lora_add(want, x.double(), one, LAYER, TARGETS)
        return want

    return batch, expected


def weighed(pool_dtype: torch.dtype, lengths: list[int]) -> tuple[LoraBatch, Expected]:
    """Rows that share A and B, and DoRA, in mixes. Each adapter changes what the base gives, as if alone,
    times its scale.
    """
    pool, shared_rank = Pool(pool_dtype), 21
    draw = lambda *shape: torch.randn(*shape).to(pool_dtype)  # noqa: E731
    common = {t.module_id: (draw(shared_rank, IN) / 5, draw(shared_rank, t.width) / 5) for t in TARGETS}
    places = {module: pool.put(torch.cat((a.flatten(), b.flatten()))) for module, (a, b) in common.items()}
    adapters, numbers = [], []
    for number, kind in enumerate(("shared", "dora", "plain", "shared")):
        rows, values, rank = {}, {}, 3 + 16 * number
        for target in TARGETS[number % 2 :]:
            module = target.module_id
            if kind == "shared":
                b, d = draw(target.width), draw(shared_rank)
                shape = RowFormat(shared_rank, shared=True)
                rows[LAYER, module] = LoraRow(places[module], shape, vectors=pool.put(torch.cat((b, d))))
                values[module] = *common[module], d, b, None
            else:
                a, b = draw(rank, IN) / 5, draw(rank, target.width) / 5
                m = draw(target.width) if kind == "dora" else None
                stored = torch.cat([part.flatten() for part in (a, b, m) if part is not None])
                rows[LAYER, module] = LoraRow(pool.put(stored), RowFormat(rank, kind == "dora"))
                values[module] = a, b, None, None, m
        adapters.append(LoadedAdapter(rows, {}))
        numbers.append({m: tuple(p if p is None else p.double() for p in v) for m, v in values.items()})
    batch = LoraBatch(pool.flat, segments_of(lengths, WEIGHED, adapters), alignment=STEP)

    def expected(y: Tensor, x: Tensor, bias: Tensor) -> Tensor:
        want, x, bias = y.double(), x.double(), bias.double()
        for segment, members in zip(batch.segments, WEIGHED, strict=True):
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

    return batch, expected


CONTENTS: dict[str, Callable[[torch.dtype, list[int]], tuple[LoraBatch, Expected]]] = {
    "8 bits": lambda pool, lengths: float8_and_mixes(SINGLE, pool, lengths),
    "mixes": lambda pool, lengths: float8_and_mixes(MIXES, pool, lengths),
    "weighed": weighed,
}


def ops_of(kind: str, dtype: torch.dtype = torch.float32) -> ReferenceOps:
    """Of torch, of a level of instruction sets, or of the GPU."""
    if kind == "gpu":
        return cuda_ops(dtype)
    return CpuOps() if kind == "torch" else CompiledOps(open_library(kind))


def add(ops: ReferenceOps, y: Tensor, x: Tensor, batch: LoraBatch, bias: Tensor | None = None) -> Tensor:
    """A copy of y with what the adapters add, on the CPU."""
    if not isinstance(ops, CudaOps):
        got = y.clone()
        ops.lora_add(got, x, batch, LAYER, TARGETS, bias)
        return got
    got, planned = y.to(DEVICE, copy=True), plan_rows(ops, replace(batch, pool=batch.pool.to(DEVICE)), len(y))
    ops.lora_add(got, x.to(DEVICE), planned, LAYER, TARGETS, None if bias is None else bias.to(DEVICE))
    return got.cpu()


def check(got: Tensor, want: Tensor) -> None:
    error = (got.double() - want).abs().max() / want.abs().max()
    assert error < LIMIT[got.dtype], error


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("dtype", "pool"), [*DTYPES, (torch.float16, torch.float16)])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_added_as_they_mean(
    kind: str, dtype: torch.dtype, pool: torch.dtype, lengths: list[int], content: str
) -> None:
    if dtype == torch.float16 if kind != "gpu" else dtype != pool:
        pytest.skip("no such adapters there")
    torch.manual_seed(0)
    batch, expected = CONTENTS[content](pool, lengths)
    total = sum(lengths) + len(lengths) + 1
    x = (torch.randn(total, 2 * IN) / 3).to(dtype)[:, IN:]
    y, bias = torch.randn(total, sum(WIDTHS)).to(dtype), torch.randn(sum(WIDTHS)).to(dtype)
    want, ops = expected(y, x, bias), ops_of(kind, dtype)
    spare = [0, *(segment.stop for segment in batch.segments)]
    for made in (ops, ReferenceOps()) if kind != "gpu" else (ops,):
        got = add(made, y, x, batch, bias)
        check(got, want)
        assert torch.equal(got[spare], y[spare]), "a base row was touched"
    got = add(ops, y, x, batch, bias)
    tiles_differ = kind == "gpu" and max(lengths) > 1
    if kind == "torch" or tiles_differ or (kind != "gpu" and dtype != torch.float32):
        return  # torch's products are free to sum in another order, and so are tiles of another size
    for segment in batch.segments:
        alone = add(ops, y, x, replace(batch, segments=(segment,)), bias)
        rows = slice(segment.start, segment.stop)
        assert torch.equal(alone[rows], got[rows]), "rows beside it changed a row"


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
    batch, _ = encoded(pool, lengths, MIXES)
    total = sum(lengths) + len(lengths) + 1
    x, y = torch.randn(total, 2 * IN)[:, IN:], torch.randn(total, sum(WIDTHS))
    made: list[Tensor] = []
    for count in (1, 2, 5):
        threads(count)
        made.append(y)
        for segment in batch.segments:  # alone it is few tasks
            made[-1] = add(ops, made[-1], x, replace(batch, segments=(segment,)))
    together = add(ops, y, x, batch)
    assert all(torch.equal(together, alone) for alone in made)


@pytest.mark.parametrize("acting", [SINGLE, MIXES], ids=["8 bits", "mixes"])
@pytest.mark.parametrize("lengths", [[1, 1], [3, 1, 12, 2]], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_experts_add_what_their_rows_mean(kind: str, lengths: list[int], acting: tuple[Acting, ...]) -> None:
    torch.manual_seed(1)
    made = expert_ops() if kind == "gpu" else ops_of(kind)
    batch, single = encoded(torch.float32, lengths, acting, EXPERT_TARGETS, EXPERTS)
    total = sum(lengths) + len(lengths) + 1
    choices = torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(total)])
    x, y = torch.randn(2 * total, IN) / 7, torch.randn(2 * total, 56)
    want = y.double()
    for one in single:
        pairs = pair_up(choices, EXPERTS, one)[0]
        ReferenceOps().expert_lora_add(want, x.double(), one, pairs, LAYER, EXPERT_TARGETS)
    got, planned = y.clone(), batch
    if kind == "gpu":
        got, x, choices, batch = (
            got.to(DEVICE),
            x.to(DEVICE),
            choices.to(DEVICE),
            replace(batch, pool=batch.pool.to(DEVICE)),
        )
        planned = plan_rows(made, batch, total)
    pairs, _ = made.pair_up(choices, EXPERTS, planned)
    made.expert_lora_add(got, x, planned, pairs, LAYER, EXPERT_TARGETS)
    check(got.cpu(), want)
    assert not torch.equal(got.cpu(), y)


def pool_of(parts: list[Tensor], pool: torch.dtype) -> Tensor:
    """8-bit floats side by side, as a pool of a wider type holds them."""
    stored = torch.cat(parts).view(torch.uint8)
    return torch.nn.functional.pad(stored, (0, -len(stored) % 4)).view(pool)


@pytest.mark.parametrize("pool", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [254, 37])
def test_every_8_bit_number_is_widened_exactly(ops: CpuOps, count: int, pool: torch.dtype) -> None:
    """Through A one by one, and through B, in vectors and in what is left over from them."""
    every = torch.arange(256, dtype=torch.uint8).view(FP8)
    numbers, one = every[~every.float().isnan()], torch.ones(1).to(FP8)
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


def batch_of(lengths: list[int], ranks: list[int]) -> tuple[LoraBatch, list[dict]]:
    """Segments of so many rows, a base row before each; the second has no row for the second target, the
    third none at all. The fourth has DoRA. Also A [E, r, in], B [E, r, out] and the magnitude [E, out], ones
    without DoRA, by module."""
    pieces, used, start = [torch.full((3,), float("nan"))], 3, 1
    segments, matrices = [], []
    for number, (length, rank) in enumerate(zip(lengths, ranks, strict=True)):
        rows, plain = {}, {}
        for target in EXPERT_TARGETS[: (2, 1, 0)[number % 3]]:
            pair = torch.randn(EXPERTS, rank, IN), torch.randn(EXPERTS, rank, target.width)
            dora, ones = number % 4 == 3, torch.ones(EXPERTS, target.width)
            magnitude = torch.rand_like(ones) + 0.5 if dora else ones
            rows[EXPERT_LAYER, target.module_id] = LoraRow(used, RowFormat(rank, dora))
            plain[target.module_id] = *pair, magnitude
            parts = [*pair, magnitude] if dora else pair
            stored = torch.cat([part.flatten(1) for part in parts], dim=1).flatten()
            pieces += [stored, torch.full((7,), float("nan"))]
            used += len(stored) + 7
        segments.append(LoraSegment(start, start + length, rows))
        matrices.append(plain)
        start += length + 1
    return LoraBatch(torch.cat(pieces), tuple(segments)), matrices


def choose_experts(rows: int, device: torch.device = DEVICE) -> Tensor:
    """Two for each row."""
    return torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(rows)]).to(device)


@pytest.mark.parametrize(
    ("dtype", "pool"),
    [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)],
)
@pytest.mark.parametrize(
    ("lengths", "ranks"),
    [
        ([1], [1]),
        ([3, 1, 2, 9], [64, 8, 4, 3]),
        pytest.param([2, 40, 1, 70], [16, 512, 5, 1], marks=pytest.mark.extended),
    ],
)
@pytest.mark.parametrize("kind", ["torch", *PARAMS, "gpu"])
def test_each_pair_gets_its_own_delta(
    kind: str, lengths: list[int], ranks: list[int], dtype: torch.dtype, pool: torch.dtype
) -> None:
    if kind == "gpu" and dtype != pool:
        pytest.skip("no such adapters there")
    torch.manual_seed(1)
    batch, matrices = batch_of(lengths, ranks)
    total, device = sum(lengths) + len(lengths) + 1, DEVICE if kind == "gpu" else torch.device("cpu")
    choices = choose_experts(total, device)
    host, places = pair_up(choices.cpu(), EXPERTS, batch)
    x, y = torch.randn(2 * total, IN) / 7, torch.randn(2 * total, sum(EXPERT_WIDTHS))
    want = y.clone()
    owner = {row: n for n, s in enumerate(batch.segments) for row in range(s.start, s.stop)}
    experts = choices.flatten().cpu()[places.argsort()].tolist()
    for pair, (row, expert) in enumerate(zip(host.rows.tolist(), experts, strict=True)):
        for target in EXPERT_TARGETS:
            if row in owner and target.module_id in matrices[owner[row]]:
                a, b, magnitude = matrices[owner[row]][target.module_id]
                columns = slice(target.start, target.start + target.width)
                want[pair, columns] += x[pair] @ a[expert].T @ b[expert]
                want[pair, columns] *= magnitude[expert]
    narrow = LoraBatch(batch.pool.to(pool).to(device), batch.segments)
    cpu = CpuOps() if kind == "torch" else None if kind == "gpu" else CompiledOps(open_library(kind))
    untouched = [n for n, row in enumerate(host.rows.tolist()) if row not in owner]
    assert len(untouched) == 2 * (len(lengths) + 1)
    for made in (expert_ops(dtype),) if cpu is None else (cpu, ReferenceOps()):
        got = y.to(dtype, copy=True).to(device)
        lora = plan_rows(made, narrow, total) if isinstance(made, CudaOps) else narrow
        pairs, _ = made.pair_up(choices, EXPERTS, lora)
        assert torch.equal(pairs.rows.cpu(), host.rows)
        made.expert_lora_add(got, x.to(dtype).to(device), lora, pairs, EXPERT_LAYER, EXPERT_TARGETS)
        scale = want.abs().max().item()
        atol = scale * (1e-5 if pool == torch.float32 else 0.02)
        torch.testing.assert_close(got.float().cpu(), want, rtol=0, atol=atol)
        assert torch.equal(got[untouched].cpu(), y.to(dtype)[untouched]), "a base row was touched"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_row_meets_its_experts_weight(ops: CpuOps, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weights = [torch.randn(40, IN, dtype=dtype) for _ in range(EXPERTS)]
    choices = torch.tensor([[0, 3], [3, 4], [0, 4], [3, 0]])
    pairs, places = pair_up(choices, EXPERTS, None)
    x = torch.randn(4, IN, dtype=dtype)
    packed = tuple(ops.pack(weight) for weight in weights)
    got = ops.expert_linear(x[pairs.rows], pairs, packed)[places].view(4, 2, 40)
    want = torch.stack(
        [torch.stack([weights[e] @ row for e in es]) for row, es in zip(x, choices.tolist(), strict=True)]
    )
    torch.testing.assert_close(got, want, rtol=0.02, atol=1e-4 if dtype == torch.float32 else 0.2)


@pytest.mark.parametrize(("rows", "dtype"), [(1, torch.bfloat16), (5, torch.float32), (100, torch.float16)])
@pytest.mark.parametrize("algo", [None, "W8A16", "FP8", "W4A16"])
def test_each_row_meets_its_experts_weight_on_a_gpu(rows: int, dtype: torch.dtype, algo: str | None) -> None:
    torch.manual_seed(0)
    made, wide, narrow = expert_ops(dtype), 2 * IN, 40
    plain = [torch.randn(narrow, wide).to(dtype).to(DEVICE) for _ in range(EXPERTS)]
    config = QuantConfig(quant_algo=algo, group_size=32)
    weights = tuple(plain if algo is None else (quantise(w, config) for w in plain))
    choices = choose_experts(rows)
    pairs, places = made.pair_up(choices, EXPERTS, None)
    x = (torch.randn(rows, wide) / 7).to(dtype).to(DEVICE)
    got = made.expert_linear(x[pairs.rows], pairs, weights)[places].view(rows, 2, narrow)
    want = torch.stack(
        [
            torch.stack([(w if isinstance(w, torch.Tensor) else w.wide()).float() @ row.float() for w in ws])
            for row, ws in zip(x, ([weights[e] for e in es] for es in choices.tolist()), strict=True)
        ]
    )
    close(got, want.to(dtype))
    if algo is not None:
        one = weights[0]
        assert isinstance(one, QuantisedWeight)
        close(quantised_rows(x, weight_table([one])), quantised_linear(x, one, None))
