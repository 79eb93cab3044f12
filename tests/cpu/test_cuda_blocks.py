"""Protects the choice of block sizes: the fastest, made once and outside of steps, and no choice changes an
answer or lets a row depend on its company."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from test_cuda_experts import choose_experts
from test_cuda_kernels import DEVICE, IN, TARGETS, WIDTHS, attention_batch, close, limits, lora_batch
from test_cuda_quantised import weight_of
from test_expert_kernels import EXPERTS
from test_graphs import CPU, Recorder, answers, make_world, open_engine

from manylora.kernels.cuda import attention, grouped, lora
from manylora.kernels.cuda.attention import PagedAttention
from manylora.kernels.cuda.blocks import MOST_SECONDS, BlockChooser, Blocks
from manylora.kernels.cuda.grouped import quantised_rows, weight_table
from manylora.kernels.cuda.ops import CudaOps
from manylora.kernels.cuda.tables import plan_attention
from manylora.kernels.device import Device
from manylora.kernels.quantised import quantised_linear
from manylora.kernels.reference import ReferenceOps
from manylora.kernels.spec import AttentionParams, LoraBatch
from manylora.kernels.transfer import to_device

FEW = (Blocks(64), Blocks(128), Blocks(256, warps=8))


class Number(BlockChooser):
    """Always the same one of the candidates."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def choose(self, shape: str, candidates: Sequence[Blocks], launch: Callable[[Blocks], object]) -> Blocks:
        return candidates[self.number % len(candidates)]


REFUSALS = (
    triton.OutOfResources(300_000, 232_448, "shared memory"),
    RuntimeError("Triton Error [CUDA]: invalid argument"),
)


class Machine:
    """A clock on which larger blocks are faster, and the largest are refused."""

    def __init__(self, refusal: Exception = REFUSALS[0]) -> None:
        self.ran: list[int] = []
        self.now = 0.0
        self.refusal = refusal

    def launch(self, blocks: Blocks) -> None:
        if blocks.size == 256:
            raise self.refusal
        self.ran.append(blocks.size)

    def clock(self, call: Callable[[], object]) -> float:
        call()
        self.now += 1
        return 1 / self.ran[-1]


@pytest.mark.parametrize("refusal", REFUSALS, ids=["triton", "driver"])
def test_the_fastest_is_chosen_once_and_kept(tmp_path: Path, refusal: Exception) -> None:
    machine, path = Machine(refusal), tmp_path / "cache" / "blocks.json"
    made = BlockChooser(machine.clock, path, lambda: machine.now)
    assert made.choose("a", FEW, machine.launch) == FEW[0]
    assert not machine.ran, "nothing is measured in a step"
    with made.measuring():
        assert made.choose("a", FEW, machine.launch) == FEW[1], "the last one does not fit"
        assert machine.ran == [64, 128]
        assert made.choose("a", FEW, machine.launch) == FEW[1]
    assert made.choose("a", FEW, machine.launch) == FEW[1]
    assert made.choose("b", FEW, machine.launch) == FEW[0]
    assert machine.ran == [64, 128]
    again = BlockChooser(machine.clock, path, lambda: machine.now)
    with again.measuring():
        assert again.choose("a", FEW, machine.launch) == FEW[1]
        assert machine.ran == [64, 128]
    assert again.choose("a", FEW[:1], machine.launch) == FEW[0], "a choice of another version"
    assert [file.name for file in path.parent.iterdir()] == ["blocks.json"]


def test_what_is_refused_in_every_form_is_not_kept(tmp_path: Path) -> None:
    machine = Machine()
    made = BlockChooser(machine.clock, tmp_path / "blocks.json", lambda: machine.now)
    with made.measuring():
        assert made.choose("a", FEW[2:], machine.launch) == FEW[2], "its launch tells why"
    assert not made.chosen

    def full(blocks: Blocks) -> None:
        raise torch.OutOfMemoryError

    with made.measuring(), pytest.raises(torch.OutOfMemoryError):
        made.choose("a", FEW, full)


def test_measuring_ends_when_its_time_is_up() -> None:
    machine = Machine()
    made = BlockChooser(machine.clock, None, lambda: machine.now)
    with made.measuring():
        assert made.choose("a", FEW, machine.launch) == FEW[1]
        machine.now += MOST_SECONDS
        assert made.choose("b", FEW, machine.launch) == FEW[0]
    assert machine.ran == [64, 128]


@pytest.mark.parametrize("content", ["[1, 2", "[]", '{"a": []}', '{"a": 1}', '{"a": [1, 2, 3, 4, 5]}'])
def test_a_broken_file_is_not_used(content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "blocks.json"
    path.write_text(content, encoding="utf-8")
    machine = Machine()
    made = BlockChooser(machine.clock, path, lambda: machine.now)
    assert f"{path} is not used" in caplog.text
    with made.measuring():
        assert made.choose("a", FEW, machine.launch) == FEW[1]
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": [128, 4, 3, 1]}


def test_choices_that_cannot_be_kept_are_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    machine = Machine()
    made = BlockChooser(machine.clock, tmp_path / "file" / "blocks.json", lambda: machine.now)
    with made.measuring():
        made.choose("a", FEW, machine.launch)
    assert "cannot be kept" in caplog.text
    assert made.choose("a", FEW, machine.launch) == FEW[1]


def _most(*groups: tuple[Blocks, ...]) -> range:
    return range(max(map(len, groups)))


@pytest.mark.parametrize(("lengths", "ranks"), [([1, 1], [5, 33]), ([3, 20], [8, 17])], ids=["rows", "tiles"])
@pytest.mark.parametrize(
    "number", _most(lora.SHRINK_ROWS, lora.SHRINK_TILES, lora.EXPAND_ROWS, lora.EXPAND_TILES[16])
)
def test_adapters_add_the_same_with_every_choice(lengths: list[int], ranks: list[int], number: int) -> None:
    torch.manual_seed(0)
    batch = lora_batch(lengths, ranks, True, torch.float32)
    made = CudaOps(chooser=Number(number))
    made.reserve(limits(), DEVICE)
    total = sum(lengths) + len(lengths) + 1
    x, y = torch.randn(total, IN, device=DEVICE) / 7, torch.randn(total, sum(WIDTHS), device=DEVICE)
    planned = to_device(made.plan(attention_batch([1] * total, [1] * total), batch)[1], DEVICE)
    want = y.clone()
    ReferenceOps().lora_add(want, x, LoraBatch(batch.pool, batch.segments), 2, TARGETS)
    made.lora_add(y, x, planned, 2, TARGETS)
    close(y, want)


@pytest.mark.parametrize("rows", [5, 40])
@pytest.mark.parametrize("number", _most(grouped.SMALL_TILES + grouped.SMALL_SPLIT))
def test_weights_multiply_the_same_with_every_choice(number: int, rows: int) -> None:
    torch.manual_seed(0)
    chooser, weight = Number(number), weight_of("W4A16", torch.float32)
    x = torch.randn(rows, weight.shape[1], device=DEVICE)
    close(quantised_rows(x, weight_table([weight]), chooser), quantised_linear(x, weight, None))
    made = CudaOps(chooser=chooser)
    made.reserve(limits(num_experts=EXPERTS), DEVICE)
    weights = tuple(torch.randn(24, 32, device=DEVICE) for _ in range(EXPERTS))
    choices, x = choose_experts(rows), torch.randn(rows, 32, device=DEVICE)
    pairs, places = made.pair_up(choices, EXPERTS, None)
    got = made.expert_linear(x[pairs.rows], pairs, weights)[places].view(rows, 2, 24)
    want = [torch.stack([weights[e] @ row for e in es]) for row, es in zip(x, choices.tolist(), strict=True)]
    close(got, torch.stack(want))


@pytest.mark.parametrize("rows", [16, 64])
def test_few_rows_of_one_weight_may_fill_a_gpu(rows: int) -> None:
    """With the inputs in parts, whose sums are added in one order whatever rows are beside."""
    offered: list[Sequence[Blocks]] = []

    class Parts(BlockChooser):
        def choose(self, shape, candidates, launch):  # type: ignore[no-untyped-def]
            offered.append(candidates)
            return candidates[-1]

    torch.manual_seed(0)
    weight, chooser = weight_of("W8A16", torch.float32, columns=160), Parts()
    x = torch.randn(rows, 160, device=DEVICE)
    table = weight_table([weight])
    many, few = quantised_rows(x, table, chooser), quantised_rows(x[: rows // 4 + 1], table, chooser)
    close(many, quantised_linear(x, weight, None))
    assert torch.equal(many[: len(few)], few)
    assert offered[0] == offered[1] and offered[0][-1].splits > 1
    assert max(4096 // blocks.size * blocks.splits for blocks in offered[0]) >= 132


@pytest.mark.parametrize("counts", [[1, 1, 1], [30, 2, 5]], ids=["decoding", "prompts"])
@pytest.mark.parametrize("number", _most(attention.DECODE, attention.PROMPTS, attention.WIDE_PROMPTS))
def test_attention_is_the_same_with_every_choice(counts: list[int], number: int) -> None:
    torch.manual_seed(0)
    k, v = (torch.randn(128, 4, 2, 24, device=DEVICE) for _ in "kv")
    lengths = [150, 33, 7]
    batch, q = attention_batch(counts, lengths), torch.randn(sum(counts), 6, 24, device=DEVICE)
    planned = to_device(plan_attention(batch, limits(), fixed=False, part_keys=128), DEVICE)
    want = ReferenceOps().attention(q, k, v, batch, AttentionParams(0.2, 40))
    close(PagedAttention(Number(number))(q, k, v, planned, AttentionParams(0.2, 40)), want)


def test_wide_heads_in_float32_are_multiplied_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    spy = Spy(attention._attend)
    monkeypatch.setattr(attention, "_attend", spy)
    k, v = (torch.randn(128, 4, 1, 200, device=DEVICE) for _ in "kv")
    batch, q = attention_batch([9, 1], [30, 7]), torch.randn(10, 2, 200, device=DEVICE)
    shape = limits(num_heads=2, num_kv_heads=1, head_dim=200)
    planned = to_device(plan_attention(batch, shape, fixed=False, part_keys=32), DEVICE)
    want = ReferenceOps().attention(q, k, v, batch, AttentionParams(0.1, 20))
    close(PagedAttention()(q, k, v, planned, AttentionParams(0.1, 20)), want)
    assert [seen[-1] for seen in spy.seen] == 2 * [attention.PIECE], "the row that decodes, and the prompt"


def test_a_block_of_keys_lies_in_one_part() -> None:
    offered: list[Sequence[Blocks]] = []

    class Watched(BlockChooser):
        def choose(self, shape, candidates, launch):  # type: ignore[no-untyped-def]
            offered.append(candidates)
            return candidates[-1]

    k, v = (torch.randn(128, 4, 2, 24, device=DEVICE) for _ in "kv")
    batch, q = attention_batch([1], [90]), torch.randn(1, 6, 24, device=DEVICE)
    planned = to_device(plan_attention(batch, limits(), fixed=False, part_keys=32), DEVICE)
    want = ReferenceOps().attention(q, k, v, batch, AttentionParams(0.2))
    close(PagedAttention(Watched())(q, k, v, planned, AttentionParams(0.2)), want)
    assert {blocks.size for blocks in offered[0]} == {16, 32}


class Spy:
    """A kernel that keeps what decides how it sums."""

    ORDER = ("BLOCK_R", "BLOCK_K", "BLOCK_N", "BLOCK_M", "SPLITS", "num_warps", "num_stages", "PIECE_D")

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.seen = kernel, list[Any]()

    def __getitem__(self, grid: Any) -> Any:
        def launch(*arguments: Any, **constants: Any) -> None:
            self.seen.append([constants.get(name) for name in self.ORDER])
            self.kernel[grid](*arguments, **constants)

        return launch


def test_a_row_does_not_depend_on_the_ranks_and_modules_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    batch = lora_batch([1, 1, 1], [5, 80, 20], False, torch.float32)
    x, y = torch.randn(7, IN, device=DEVICE), torch.randn(7, sum(WIDTHS), device=DEVICE)
    asked: list[str] = []

    class Watched(BlockChooser):
        def choose(self, shape, candidates, launch):  # type: ignore[no-untyped-def]
            asked.append(shape)
            return super().choose(shape, candidates, launch)

    spies = [Spy(lora._shrink_rows), Spy(lora._expand)]
    monkeypatch.setattr(lora, "_shrink_rows", spies[0])
    monkeypatch.setattr(lora, "_expand", spies[1])
    found = []
    for segments in (batch.segments[1:2], batch.segments):
        made = CudaOps(chooser=Watched())
        made.reserve(limits(), DEVICE)
        some = LoraBatch(batch.pool, segments, batch.alignment)
        planned = to_device(made.plan(attention_batch([1] * 7, [1] * 7), some)[1], DEVICE)
        found.append((planned.rank, planned.modules, y.clone()))
        made.lora_add(found[-1][2], x, planned, 2, TARGETS)
    for segments in (batch.segments[:1], batch.segments[2:]):
        some = LoraBatch(batch.pool, segments, batch.alignment)
        planned = to_device(made.plan(attention_batch([1] * 7, [1] * 7), some)[1], DEVICE)
        made.lora_add(y.clone(), x, planned, 2, TARGETS)
    assert found[0][1] != found[1][1], "other modules"
    assert torch.equal(found[0][2][3], found[1][2][3])
    assert not torch.equal(found[0][2][3], y[3])
    for spy in spies:
        assert len(spy.seen) == 4 and all(one == spy.seen[0] for one in spy.seen)
    assert len(set(asked)) == 2, "a choice is of a layer's shape"


@pytest.mark.skipif(DEVICE.type == "cuda", reason="its device is a stand-in, whose kernels are interpreted")
def test_what_steps_launch_was_measured_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, adapters = make_world(tmp_path)
    measured: list[str] = []
    asked: set[str] = set()

    class Watched(BlockChooser):
        def choose(self, shape, candidates, launch):  # type: ignore[no-untyped-def]
            asked.add(shape)
            return super().choose(shape, candidates[:2], launch)

    def clock(call: Callable[[], object]) -> float:
        measured.append("once")
        call()
        return float(len(measured))

    def start() -> Device:
        chooser = Watched(clock, tmp_path / "blocks.json", now=lambda: 0.0)
        return Device(CPU, CudaOps(part_keys=32, chooser=chooser), "interpreted", Recorder())

    graphed = open_engine(model, monkeypatch, start(), max_batch_size=4)
    at_start, shapes = len(measured), set(asked)
    assert at_start > len(shapes) > 4
    plain = open_engine(model, monkeypatch, None)
    asked.clear()
    for loras in ([*adapters, None], [adapters[0]] * 3):
        assert answers(graphed, loras) == answers(plain, loras)
    assert len(measured) == at_start and asked <= shapes
    open_engine(model, monkeypatch, start(), max_batch_size=4)
    assert len(measured) == at_start, "the second start finds what the first has written"
