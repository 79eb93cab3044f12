"""Protects routed experts on the GPU's path: pairs and tiles made on the device are the host's, and the
grouped kernels say what the reference says, plain and quantised, with and without adapters."""

from __future__ import annotations

import pytest
import torch
from test_cuda_kernels import DEVICE, attention_batch, close, limits
from test_expert_kernels import EXPERTS, IN, LAYER, TARGETS, WIDTHS, batch_of

from manylora.kernels.cuda import products, routing
from manylora.kernels.cuda.arithmetic import quantise_rows
from manylora.kernels.cuda.grouped import quantised_rows, weight_table
from manylora.kernels.cuda.ops import CudaOps
from manylora.kernels.cuda.routing import DevicePairs
from manylora.kernels.experts import pair_up
from manylora.kernels.quantised import QuantisedWeight, quantised_linear
from manylora.kernels.reference import ReferenceOps
from manylora.kernels.spec import LoraBatch
from manylora.kernels.transfer import to_device
from manylora.model.quant import quantise
from manylora.quant.config import QuantConfig


def choose_experts(rows: int, top_k: int = 2) -> torch.Tensor:
    return torch.stack([torch.randperm(EXPERTS)[:top_k] for _ in range(rows)]).to(DEVICE)


def ops(dtype: torch.dtype = torch.float32) -> CudaOps:
    made = CudaOps()
    made.reserve(limits(dtype, num_experts=EXPERTS, num_layers=LAYER + 1), DEVICE)
    return made


def planned(made: CudaOps, batch: LoraBatch, rows: int, fixed: bool = False):  # type: ignore[no-untyped-def]
    attention = attention_batch([1] * rows, [1] * rows)
    return to_device(made.plan(attention, batch, fixed)[1], DEVICE)


@pytest.mark.parametrize("block", [16, 1024])
@pytest.mark.parametrize(
    ("lengths", "fixed"), [([1], True), ([1, 1, 1], True), ([3, 1, 2, 9], False), ([2, 40, 1, 70], False)]
)
def test_pairs_and_tiles_are_those_of_the_host(
    lengths: list[int], fixed: bool, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "BLOCK", block)
    torch.manual_seed(len(lengths))
    batch, _ = batch_of(lengths, [4] * len(lengths))
    total, made = sum(lengths) + len(lengths) + 1, ops()
    choices = choose_experts(total)
    lora = planned(made, batch, total, fixed)
    got, got_places = made.pair_up(choices, EXPERTS, lora)
    want, want_places = pair_up(choices, EXPERTS, batch)
    assert isinstance(got, DevicePairs)
    assert torch.equal(got.rows, want.rows)
    assert torch.equal(got_places, want_places)
    covered = [
        (pair, expert)
        for first, count, _, expert in got.tiles.tolist()
        for pair in range(first, first + count)
    ]
    experts = [e for e in range(EXPERTS) for _ in range(want.starts[e], want.starts[e + 1])]
    assert covered == list(enumerate(experts))
    assert max(count for _, count, _, _ in got.tiles.tolist()) <= got.tile_size
    slots = lora.row_slots.tolist()
    runs: list[list[int]] = []
    for first, count, slot, expert in got.lora_tiles.tolist():
        if count == 0:
            continue
        assert count <= got.lora_tile_size
        assert {slots[row] for row in got.rows[first : first + count].tolist()} == {slot}
        if runs and runs[-1][1] == first and runs[-1][2] == expert and slot == runs[-1][3]:
            runs[-1][1] += count
        else:
            runs.append([first, first + count, expert, slot])
    assert [run[:3] for run in runs] == want.groups[:, :3].tolist()


@pytest.mark.parametrize(
    ("lengths", "ranks", "dtype"),
    [
        ([1], [1], torch.float32),
        ([3, 1, 2, 9], [64, 8, 4, 3], torch.float32),
        ([3, 1, 2, 9], [64, 8, 4, 3], torch.bfloat16),
        pytest.param([2, 20, 1, 50], [16, 512, 5, 1], torch.bfloat16, marks=pytest.mark.extended),
    ],
)
def test_each_pair_gets_its_own_delta(lengths: list[int], ranks: list[int], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    plain, _ = batch_of(lengths, ranks)
    batch = LoraBatch(plain.pool.to(dtype).to(DEVICE), plain.segments)
    total, made = sum(lengths) + len(lengths) + 1, ops(dtype)
    choices = choose_experts(total)
    x = (torch.randn(2 * total, IN) / 7).to(dtype).to(DEVICE)
    y = torch.randn(2 * total, sum(WIDTHS)).to(dtype).to(DEVICE)
    host, _ = pair_up(choices, EXPERTS, batch)
    want, got = y.float(), y.clone()
    ReferenceOps().expert_lora_add(
        want, x.float(), LoraBatch(batch.pool.float(), batch.segments), host, LAYER, TARGETS
    )
    lora = planned(made, batch, total)
    pairs, _ = made.pair_up(choices, EXPERTS, lora)
    made.expert_lora_add(got, x, lora, pairs, LAYER, TARGETS)
    error = (got.float() - want).abs().max() / want.abs().max()
    assert error < (1e-5 if dtype == torch.float32 else 0.01)
    spare = {0, *(segment.stop for segment in batch.segments)}
    untouched = [n for n, row in enumerate(pairs.rows.tolist()) if row in spare]
    assert torch.equal(got[untouched], y[untouched]), "a base row was touched"
    assert not torch.equal(got, y)


@pytest.mark.parametrize(("rows", "dtype"), [(1, torch.bfloat16), (5, torch.float32), (100, torch.float16)])
@pytest.mark.parametrize("algo", [None, "W8A16", "FP8", "W4A16"])
def test_each_row_meets_its_experts_weight(rows: int, dtype: torch.dtype, algo: str | None) -> None:
    torch.manual_seed(0)
    made, wide, narrow = ops(dtype), 2 * IN, 40
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


@pytest.mark.parametrize(("rows", "dtype"), [(3, torch.bfloat16), (40, torch.float16)])
def test_experts_in_eight_bits_meet_rows_in_eight_bits_where_there_are_units(
    rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row rounded with a scale of its own; the adapters' products are not rounded."""
    monkeypatch.setattr(products, "has_fp8_units", lambda device: True)
    torch.manual_seed(0)
    made, narrow = ops(dtype), 40
    plain = [torch.randn(narrow, IN).to(dtype).to(DEVICE) for _ in range(EXPERTS)]
    weights = tuple(made.pack(quantise(w, QuantConfig("FP8")), routed=True) for w in plain)
    choices = choose_experts(rows)
    pairs, places = made.pair_up(choices, EXPERTS, None)
    x = (torch.randn(rows, IN) * torch.rand(rows, 1)).to(dtype).to(DEVICE)
    got = made.expert_linear(x[pairs.rows], pairs, weights)[places].view(rows, 2, narrow)
    values, scales = quantise_rows(x)
    rounded = values.float() * scales
    for number, experts in enumerate(choices.tolist()):
        for place, expert in enumerate(experts):
            weight = weights[expert]
            assert isinstance(weight, QuantisedWeight)
            want = weight.values.float() @ rounded[number] * weight.scales.flatten().float()
            close(got[number, place], want.to(dtype))
    assert (got.float() - (x.float() @ plain[0].float().T)[:, None]).abs().max() > 0.1, "other experts"
