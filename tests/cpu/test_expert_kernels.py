"""Protects the operations of routed experts: pairs are sorted, each group is one expert under one adapter,
pairs and tiles made on a GPU are the host's, and kernels say what is written down, plain and quantised."""

from __future__ import annotations

import pytest
import torch
from levels import PARAMS, open_library
from test_cuda_kernels import DEVICE, attention_batch, close, limits
from torch import Tensor

from manylora.checkpoints.quant.config import QuantConfig
from manylora.kernels.compiled import CompiledOps
from manylora.kernels.cpu import CpuOps
from manylora.kernels.cuda.grouped import quantised_rows, weight_table
from manylora.kernels.cuda.ops import CudaOps
from manylora.kernels.lora import pair_up
from manylora.kernels.quantised import QuantisedWeight, quantised_linear
from manylora.kernels.reference import ReferenceOps
from manylora.kernels.row_format import RowFormat
from manylora.kernels.spec import LoraBatch, LoraRow, LoraSegment, LoraTarget
from manylora.kernels.transfer import to_device
from manylora.model.quant import quantise

EXPERTS, IN, WIDTHS = 5, 48, (32, 24)
TARGETS = tuple(LoraTarget(13 + m, sum(WIDTHS[:m]), width) for m, width in enumerate(WIDTHS))
LAYER = 3
CPU = torch.device("cpu")


def batch_of(lengths: list[int], ranks: list[int]) -> tuple[LoraBatch, list[dict]]:
    """Segments of so many rows, a base row before each; the second has no row for the second target, the
    third none at all. The fourth has DoRA. Also A [E, r, in], B [E, r, out] and the magnitude [E, out], ones
    without DoRA, by module."""
    pieces, used, start = [torch.full((3,), float("nan"))], 3, 1
    segments, matrices = [], []
    for number, (length, rank) in enumerate(zip(lengths, ranks, strict=True)):
        rows, plain = {}, {}
        for target in TARGETS[: (2, 1, 0)[number % 3]]:
            pair = torch.randn(EXPERTS, rank, IN), torch.randn(EXPERTS, rank, target.width)
            dora, ones = number % 4 == 3, torch.ones(EXPERTS, target.width)
            magnitude = torch.rand_like(ones) + 0.5 if dora else ones
            rows[LAYER, target.module_id] = LoraRow(used, RowFormat(rank, dora))
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


def cuda_ops(dtype: torch.dtype = torch.float32) -> CudaOps:
    made = CudaOps()
    made.reserve(limits(dtype, num_experts=EXPERTS, num_layers=LAYER + 1), DEVICE)
    return made


def planned(made: CudaOps, batch: LoraBatch, rows: int, fixed: bool = False):  # type: ignore[no-untyped-def]
    attention = attention_batch([1] * rows, [1] * rows)
    return to_device(made.plan(attention, batch, fixed)[1], DEVICE)


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
    total, device = sum(lengths) + len(lengths) + 1, DEVICE if kind == "gpu" else CPU
    choices = choose_experts(total, device)
    host, places = pair_up(choices.cpu(), EXPERTS, batch)
    x, y = torch.randn(2 * total, IN) / 7, torch.randn(2 * total, sum(WIDTHS))
    want = y.clone()
    owner = {row: n for n, s in enumerate(batch.segments) for row in range(s.start, s.stop)}
    experts = choices.flatten().cpu()[places.argsort()].tolist()
    for pair, (row, expert) in enumerate(zip(host.rows.tolist(), experts, strict=True)):
        for target in TARGETS:
            if row in owner and target.module_id in matrices[owner[row]]:
                a, b, magnitude = matrices[owner[row]][target.module_id]
                columns = slice(target.start, target.start + target.width)
                want[pair, columns] += x[pair] @ a[expert].T @ b[expert]
                want[pair, columns] *= magnitude[expert]
    narrow = LoraBatch(batch.pool.to(pool).to(device), batch.segments)
    cpu = CpuOps() if kind == "torch" else None if kind == "gpu" else CompiledOps(open_library(kind))
    untouched = [n for n, row in enumerate(host.rows.tolist()) if row not in owner]
    assert len(untouched) == 2 * (len(lengths) + 1)
    for made in (cuda_ops(dtype),) if cpu is None else (cpu, ReferenceOps()):
        got = y.to(dtype, copy=True).to(device)
        lora = planned(made, narrow, total) if isinstance(made, CudaOps) else narrow
        pairs, _ = made.pair_up(choices, EXPERTS, lora)
        assert torch.equal(pairs.rows.cpu(), host.rows)
        made.expert_lora_add(got, x.to(dtype).to(device), lora, pairs, LAYER, TARGETS)
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
    made, wide, narrow = cuda_ops(dtype), 2 * IN, 40
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
