"""Protects the order of a linear layer's launches: whatever was found to be faster, the shrink has its input,
the expansion both sums, and the answer is the same. Streams are doubles that note what waits for what."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cuda_kernels import DEVICE, IN, TARGETS, WIDTHS, attention_batch, limits, lora_batch
from torch import Tensor

from manylora.kernels.cuda import lora, ops
from manylora.kernels.cuda.blocks import IN_TURN, ORDERS, BlockChooser, Blocks, Order
from manylora.kernels.cuda.capture import SecondStream
from manylora.kernels.cuda.ops import CudaOps
from manylora.kernels.transfer import to_device

BESIDE, EARLY = ORDERS[1:]


class Streams:
    """Stands for torch's. log: launches with their stream, and waits of one stream for another."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[str, str]] = []
        self.present = "main"
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(self, "second"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(self, self.present))
        monkeypatch.setattr(torch.cuda, "stream", self.entered)

    @contextmanager
    def entered(self, stream: Stream) -> Iterator[None]:
        before, self.present = self.present, stream.name
        yield
        self.present = before

    def note(self, what: str) -> None:
        self.log.append((self.present, what))


class Stream:
    def __init__(self, streams: Streams, name: str) -> None:
        self.streams, self.name = streams, name

    def wait_stream(self, other: Stream) -> None:
        self.streams.log.append((self.name, f"waits for {other.name}"))


def world(monkeypatch: pytest.MonkeyPatch, chooser: BlockChooser) -> tuple[Callable[[], Tensor], Streams]:
    """A linear layer of a batch with adapters, on a device that has all orders."""
    streams = Streams(monkeypatch)
    made = CudaOps(chooser=chooser)
    made.reserve(limits(), DEVICE)
    adapters = lora_batch([1, 1], [8, 20], True, torch.float32)
    _, planned = made.plan(attention_batch([1] * 4, [5] * 4), adapters)
    batch = to_device(planned, DEVICE)
    made._second, made._orders = SecondStream(DEVICE), ORDERS
    launch, linear = lora.launch, made.linear

    def noted(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        early = constants.pop("launch_pdl", False)
        assert constants["EARLY"] is early
        streams.note(kernel.__name__.split("_")[1] + " early" * early)
        launch(kernel, grid, *arguments, **constants | {"EARLY": False})  # the interpreter has no such thing

    monkeypatch.setattr(lora, "launch", noted)
    monkeypatch.setattr(made, "linear", lambda *a: (streams.note("linear"), linear(*a))[1])
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, IN, generator=generator).to(DEVICE)
    weight = torch.randn(sum(WIDTHS), IN, generator=generator).to(DEVICE)
    return lambda: made.adapted_linear(x, weight, None, batch, 0, TARGETS), streams


def choosing(order: Order) -> BlockChooser:
    chooser = BlockChooser()
    chooser.choose_order = lambda shape, orders, launch: order  # type: ignore[method-assign]
    return chooser


def test_every_order_keeps_what_depends_on_what(monkeypatch: pytest.MonkeyPatch) -> None:
    in_turn = [("main", "linear"), ("main", "shrink"), ("main", "expand")]
    early = [("main", "linear"), ("main", "shrink early"), ("main", "expand early")]
    beside = [
        ("second", "waits for main"), ("second", "shrink"), ("main", "linear"),
        ("main", "waits for second"), ("main", "expand"),
    ]  # fmt: skip
    answers = []
    for order, want in ((IN_TURN, in_turn), (BESIDE, beside), (EARLY, early)):
        with monkeypatch.context() as patch:
            run, streams = world(patch, choosing(order))
            patch.setattr(ops, "is_recording", lambda: True)
            answers.append(run())
            assert streams.log == want
            patch.setattr(ops, "is_recording", lambda: False)
            streams.log.clear()
            answers.append(run())
            assert streams.log == in_turn, "a step that is launched kernel by kernel"
    assert all(torch.equal(answers[0], answer) for answer in answers[1:])


def test_the_order_is_timed_in_a_recording_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    timed: list[list[tuple[str, str]]] = []
    recording = False

    def recorded(call: Callable[[], object]) -> float:
        nonlocal recording
        recording = True
        streams.log.clear()
        call()
        timed.append(list(streams.log))
        recording = False
        return 3.0 - len(timed)  # each is faster than the one before

    def plain(call: Callable[[], object]) -> float:
        assert not recording, "block sizes are measured inside a recording"
        call()
        return 1.0

    path = tmp_path / "choices.json"
    chooser = BlockChooser(plain, path, recorded_clock=recorded)
    run, streams = world(monkeypatch, chooser)
    monkeypatch.setattr(ops, "is_recording", lambda: False)
    with chooser.measuring():
        run()
        run()
    assert [len(log) for log in timed] == [3, 5, 3], "each order once"
    assert [choice for choice in chooser.chosen.values() if isinstance(choice, Order)] == [EARLY]
    again = BlockChooser(path=path)
    assert again.chosen == chooser.chosen
    assert any(isinstance(choice, Blocks) for choice in again.chosen.values())


def test_an_order_that_cannot_be_recorded_is_not_chosen() -> None:
    def recorded(call: Callable[[], object]) -> float:
        call()
        return 1.0

    def launch(order: Order) -> None:
        if order.early:
            raise RuntimeError("operation not permitted when stream is capturing")

    chooser = BlockChooser(lambda call: 1.0, recorded_clock=recorded)
    with chooser.measuring():
        assert chooser.choose_order("layer", ORDERS[::-1], launch) == BESIDE
    assert chooser.choose_order("another", ORDERS, launch) == IN_TURN, "nothing is measured in a step"
