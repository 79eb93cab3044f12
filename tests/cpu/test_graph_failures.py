"""Protects a server from what fails while it records, launches or fetches: a shape that cannot be recorded is
launched plainly, a step that fails ends its requests alone, a device that is lost ends the engine."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_graphs import CPU, Recorder, answers, open_engine
from tiny_models import make_model
from torch import Tensor

from manylora.engine.graphs import MOST_FAILURES, DecodeGraphs
from manylora.engine.inputs import StepInputs
from manylora.engine.loop import EngineLoop
from manylora.errors import DeviceLostError, EngineDeadError, RequestError
from manylora.kernels.cuda.ops import CudaOps
from manylora.kernels.device import CudaCapture, Device
from manylora.kernels.spec import BatchLimits
from manylora.request import Event, Request, SamplingConfig

LIMITS = BatchLimits(1, 8, 64, 4, 2, 2, 8, torch.float32)


class Failing(Recorder):
    """Raises instead of recording, where `raises` returns an error for the number of the recording."""

    def __init__(self, raises: Callable[[int], Exception | None]) -> None:
        super().__init__()
        self.tried, self._raises = 0, raises

    def __call__(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.tried += 1
        error = self._raises(self.tried)
        if error is not None:
            raise error
        return super().__call__(function)


def new_graphs(
    recorder: Recorder, max_graphs: int = 8, limits: BatchLimits = LIMITS, **options: Any
) -> DecodeGraphs:
    ops = CudaOps()
    ops.reserve(limits, CPU)
    forward = lambda batch: batch.positions[:, None].clone()  # noqa: E731
    return DecodeGraphs(forward, ops, recorder, CPU, limits, max_graphs, **options)


def run(graphs: DecodeGraphs, rows: int) -> list[int] | None:
    """Of so many rows, which a graph repeats."""
    ids = list(range(rows))
    logits = graphs.run(StepInputs(ids, ids, [*ids, rows], [1] * rows, [[5]] * rows, ids, ids))
    assert logits is None or logits.flatten().tolist() == ids
    return None if logits is None else ids


def test_recording_is_given_up_after_a_few_errors(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Failing(lambda number: RuntimeError("not permitted") if number > 1 else None)
    graphs = new_graphs(recorder)
    assert run(graphs, 1)
    for _ in range(4):
        assert run(graphs, 3) is None
        assert run(graphs, 1), "what was recorded is replayed"
    assert recorder.tried == 1 + MOST_FAILURES
    assert caplog.text.count("could not be recorded") == MOST_FAILURES
    assert "recording has failed" in caplog.text


def test_without_memory_half_of_the_graphs_go() -> None:
    recorder = Failing(lambda number: torch.OutOfMemoryError() if number == 4 else None)
    graphs = new_graphs(recorder)
    for rows in (1, 2, 4):
        assert run(graphs, rows)
    assert run(graphs, 8) is None
    for rows, again in ((4, 0), (2, 0), (1, 1), (8, 1), (2, 0)):
        before = recorder.tried
        assert run(graphs, rows)
        assert recorder.tried - before == again, rows
    assert graphs.num_failures == 0


def test_with_every_third_recording_out_of_memory_all_go_on() -> None:
    recorder = Failing(lambda number: None if number % 3 else torch.OutOfMemoryError())
    graphs = new_graphs(recorder)
    for _ in range(16):
        for rows in (1, 2, 4, 8):
            run(graphs, rows)
    assert recorder.replayed > 4 * recorder.recorded > 16


def test_a_shape_is_recorded_when_it_comes_again() -> None:
    recorder = Recorder()
    graphs = new_graphs(recorder, plain_uses=2)
    assert [run(graphs, 3) is None for _ in range(4)] == [True, True, False, False]
    assert recorder.recorded == 1
    graphs.warm()
    assert recorder.recorded == 4, "at start all are recorded at once: 1, 2, 4 and 8 rows"


def test_the_start_records_longer_tables_within_bounds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 1, 2, 4 and 8 rows, with up to 16, 64, 256 and 1024 blocks each."""
    limits = replace(LIMITS, max_seq_len=4096)
    caplog.set_level(logging.INFO, logger="manylora")
    for max_graphs, seconds, widths in (
        (100, 1e9, {16, 64, 256, 1024}),
        (24, 1e9, {16, 64, 256}),  # the other half is for batches with adapters
        (100, -1.0, {16, 64}),
        (6, 1e9, {16, 64}),
    ):
        monkeypatch.setattr("manylora.engine.graphs.WARM_SECONDS", seconds)
        graphs = new_graphs(Recorder(), max_graphs, limits, plain_uses=1)
        graphs.warm()
        count = min(max_graphs, 4 * len(widths))
        assert {width for _, width, _ in graphs._graphs} == widths
        assert graphs.num_recorded == len(graphs._graphs) == count
        assert f"recorded {count} CUDA graphs" in caplog.text and f"; {16 - count} longer" in caplog.text
    for _ in range(2):
        assert run(graphs, 3)
        rows = list(range(2))
        graphs.run(StepInputs(rows, rows, [0, 1, 2], [1, 1], [[5] * 100] * 2, rows, rows))
    kept = [key[:2] for key in graphs._graphs]
    assert (2, 256) in kept and (8, 16) in kept and len(kept) == 6, "what is common is dropped last"
    assert "of 2 rows, up to 256 blocks each, without adapters" in caplog.text


def test_a_failed_recording_leaves_the_threads_stream_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch leaves the thread on the stream of the recording where its end raises too."""
    streams = ["present"]

    class Broken:
        def __init__(self, *arguments: Any, **options: Any) -> None: ...

        def __enter__(self) -> None:
            streams[0] = "capture"

        def __exit__(self, *arguments: Any) -> None:
            raise RuntimeError("the capture was invalidated")

    class Stream:
        def wait_stream(self, other: Any) -> None: ...

        def __enter__(self) -> None: ...

        def __exit__(self, *arguments: Any) -> None: ...

    for name, value in {
        "graph_pool_handle": lambda: "pool",
        "Stream": lambda device: Stream(),
        "current_stream": lambda device: Stream(),
        "stream": lambda stream: stream,
        "CUDAGraph": lambda: None,
        "graph": Broken,
        "set_stream": lambda stream: streams.__setitem__(0, "present"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    with pytest.raises(RuntimeError, match="invalidated"):
        CudaCapture(CPU)(lambda: torch.ones(1))
    assert streams == ["present"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("failures") / "model", seed=1, num_hidden_layers=1)


def test_a_recording_that_fails_does_not_change_an_answer(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Failing(lambda number: RuntimeError("capturing") if number % 2 else None)
    device = Device(CPU, CudaOps(part_keys=32), "interpreted", recorder, overlaps=True)
    failing = open_engine(model, monkeypatch, device, max_batch_size=2, max_seq_len=32)
    plain = open_engine(model, monkeypatch, None, max_batch_size=2, max_seq_len=32)
    assert answers(failing, [None, None], new=6) == answers(plain, [None, None], new=6)
    assert recorder.tried > recorder.recorded


class Lost(Device):
    def probe(self) -> None:
        raise DeviceLostError("gone")


def ask(loop: EngineLoop) -> Event:
    got, done = [], threading.Event()
    request = Request((3, 4, 5), SamplingConfig(max_tokens=3))
    loop.submit(request, lambda event: (got.append(event), done.set()))
    assert done.wait(60)
    return got[-1]


@pytest.mark.parametrize("where", ["launch", "landing"])
def test_a_step_that_fails_ends_its_requests_alone(
    where: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(model, monkeypatch, None, enable_overlap=True)
    loop = EngineLoop(engine)
    try:
        want = ask(loop).token_ids
        with monkeypatch.context() as patch:
            name = "model.decoder.Decoder.forward" if where == "launch" else "kernels.device.Arrival.wait"
            patch.setattr(f"manylora.{name}", _raise)
            assert isinstance(ask(loop).error, RequestError)
        assert loop.alive and ask(loop).token_ids == want
        engine.check()
    finally:
        loop.close()


def test_a_lost_device_ends_the_engine(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine(model, monkeypatch, None)
    object.__setattr__(engine._parts, "device", Lost(CPU, engine._parts.device.ops, "lost"))
    monkeypatch.setattr("manylora.model.decoder.Decoder.forward", _raise)
    loop = EngineLoop(engine)
    try:
        assert isinstance(ask(loop).error, EngineDeadError)
        assert not loop.alive
        with pytest.raises(EngineDeadError):
            ask(loop)
    finally:
        loop.close()


def _raise(*arguments: Any) -> Any:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")
