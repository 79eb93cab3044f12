"""Protects the operations of routed experts: the CPU's say what the reference says, and that what is written
down; pairs are sorted, each group is one expert under one adapter, and base rows are left alone."""

from __future__ import annotations

import pytest
import torch

from manylora.kernels.cpu import CpuOps
from manylora.kernels.experts import pair_up
from manylora.kernels.reference import ReferenceOps
from manylora.kernels.row_format import RowFormat
from manylora.kernels.spec import LoraBatch, LoraRow, LoraSegment, LoraTarget

EXPERTS, IN, WIDTHS = 5, 48, (32, 24)
TARGETS = tuple(LoraTarget(13 + m, sum(WIDTHS[:m]), width) for m, width in enumerate(WIDTHS))
LAYER = 3


def batch_of(lengths: list[int], ranks: list[int]) -> tuple[LoraBatch, list[dict]]:
    """Segments of so many rows, a base row before each; the second has no row for the second target, the
    third none at all. Also A [E, r, in] and B [E, r, out] by module."""
    pieces, used, start = [torch.full((3,), float("nan"))], 3, 1
    segments, matrices = [], []
    for number, (length, rank) in enumerate(zip(lengths, ranks, strict=True)):
        rows, plain = {}, {}
        for target in TARGETS[: (2, 1, 0)[number % 3]]:
            pair = torch.randn(EXPERTS, rank, IN), torch.randn(EXPERTS, rank, target.width)
            rows[LAYER, target.module_id] = LoraRow(used, RowFormat(rank))
            plain[target.module_id] = pair
            stored = torch.cat([part.flatten(1) for part in pair], dim=1).flatten()
            pieces += [stored, torch.full((7,), float("nan"))]
            used += len(stored) + 7
        segments.append(LoraSegment(start, start + length, rows))
        matrices.append(plain)
        start += length + 1
    return LoraBatch(torch.cat(pieces), tuple(segments)), matrices


@pytest.mark.parametrize(
    ("dtype", "pool"),
    [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)],
)
@pytest.mark.parametrize(
    ("lengths", "ranks"), [([1], [1]), ([3, 1, 2, 9], [64, 8, 4, 3]), ([2, 40, 1, 70], [16, 512, 5, 1])]
)
def test_each_pair_gets_its_own_delta(
    ops: CpuOps, lengths: list[int], ranks: list[int], dtype: torch.dtype, pool: torch.dtype
) -> None:
    torch.manual_seed(1)
    batch, matrices = batch_of(lengths, ranks)
    total = sum(lengths) + len(lengths) + 1
    choices = torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(total)])
    pairs, places = pair_up(choices, EXPERTS, batch)
    x, y = torch.randn(2 * total, IN), torch.randn(2 * total, sum(WIDTHS))
    want = y.clone()
    owner = {row: n for n, s in enumerate(batch.segments) for row in range(s.start, s.stop)}
    experts = choices.flatten()[places.argsort()].tolist()
    for pair, (row, expert) in enumerate(zip(pairs.rows.tolist(), experts, strict=True)):
        for target in TARGETS:
            if row in owner and target.module_id in matrices[owner[row]]:
                a, b = matrices[owner[row]][target.module_id]
                columns = slice(target.start, target.start + target.width)
                want[pair, columns] += x[pair] @ a[expert].T @ b[expert]
    exact = pool == torch.float32
    narrow = LoraBatch(batch.pool.to(pool), batch.segments)
    for made in (ops, ReferenceOps()):
        got = y.to(dtype, copy=True)
        made.expert_lora_add(got, x.to(dtype), narrow, pairs, LAYER, TARGETS)
        scale = want.abs().max().item()
        torch.testing.assert_close(got.float(), want, rtol=0, atol=scale * (1e-5 if exact else 0.02))
        untouched = [n for n, row in enumerate(pairs.rows.tolist()) if row not in owner]
        assert torch.equal(got[untouched], y.to(dtype)[untouched]), "a base row was touched"
        assert len(untouched) == 2 * (len(lengths) + 1)


def test_pairs_are_sorted_and_their_places_lead_back() -> None:
    choices = torch.tensor([[4, 0], [2, 4], [0, 4]])
    segments = (LoraSegment(0, 1, {}), LoraSegment(2, 3, {}))
    pairs, places = pair_up(choices, EXPERTS, LoraBatch(torch.empty(0), segments))
    assert pairs.rows.tolist() == [0, 2, 1, 0, 1, 2]
    assert list(pairs.starts) == [0, 2, 2, 3, 3, 6]
    assert pairs.groups.tolist() == [[0, 1, 0, 0], [1, 2, 0, 1], [3, 4, 4, 0], [5, 6, 4, 1]]
    assert pairs.rows[places].view(3, 2).tolist() == [[0, 0], [1, 1], [2, 2]]
    assert pair_up(choices, EXPERTS, None)[0].groups.shape == (0, 4)


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
