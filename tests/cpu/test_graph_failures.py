"""Protects a server from what fails while it records, launches or fetches: a shape that cannot be recorded is
launched plainly, a step that fails ends its requests alone, a device that is lost ends the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_graphs import CPU, Recorder, answers, open_engine
from tiny_models import make_model
from torch import Tensor

from manylora.engine.loop import EngineLoop
from manylora.errors import DeviceLostError, EngineDeadError, RequestError
from manylora.kernels.cuda.ops import CudaOps
from manylora.kernels.device import Device
from manylora.request import Event, Request, SamplingConfig


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
