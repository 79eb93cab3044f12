"""Protects the thread that sends the engine's responses: one that cannot be made or sent ends its own
request, and the engine stops generating for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from server_response import Client, ServerResponse, fail

from manylora.doors.triton import engine_worker
from manylora.doors.triton.engine_worker import EngineModelOptions, EngineWorker
from manylora.errors import EngineDeadError
from manylora.request import Event, FinishReason, Request, RequestMetrics, Sink
from manylora.stats import EngineStats
from manylora.system.lifeline import Lifeline

OPTIONS = EngineModelOptions(True, False, "float32", 0.01, 0.01)
METRICS = SimpleNamespace(update=lambda stats: None, observe=lambda lora, event: None)


class Engine:
    death: EngineDeadError | None = None
    stalled_s = 0.0
    has_encoder = False
    max_seq_len = 100

    def __init__(self) -> None:
        self.sinks: list[Sink] = []
        self.cancelled: list[int] = []

    def submit(self, request: Request, sink: Sink) -> int:
        if self.death is not None:
            raise self.death
        self.sinks.append(sink)
        return len(self.sinks) - 1

    def cancel(self, ticket: int) -> None:
        self.cancelled.append(ticket)
        self.sinks[ticket](Event((), finish_reason=FinishReason.CANCELLED, last=True))

    def stats(self) -> EngineStats:
        return EngineStats()

    def close(self) -> None:
        pass


def asked(bad: int | None = None, **more: Any) -> Client:
    inputs = {"input_ids": [[1, 2]], "input_lengths": [2], "request_output_len": [9], "streaming": [True]}
    return Client(inputs | more, bad)


def respond(outputs: Any) -> ServerResponse:
    return ServerResponse(dict(outputs)["output_ids"].reshape(-1).tolist() if outputs else [])


def started(*clients: Client) -> tuple[Engine, EngineWorker]:
    engine = Engine()
    worker = EngineWorker(engine, OPTIONS, Lifeline("engine"), METRICS, respond, fail)
    worker.execute(clients)
    return engine, worker


def test_a_response_that_cannot_be_sent_ends_its_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    bad, good = asked(bad=1), asked()
    engine, worker = started(bad, good)
    for token in (3, 4):
        engine.sinks[0](Event((token,), sequence_index=token))
    assert bad.done.wait(60)
    assert bad.sent == [[3], "tensorrt_llm failed on this request: RuntimeError"]
    assert engine.cancelled == [0]
    engine.sinks[1](Event((5,), finish_reason=FinishReason.LENGTH, last=True))
    assert good.done.wait(60) and good.sent == [[5]]
    worker.close()
    assert "no shared memory is left" in caplog.text


@pytest.mark.parametrize("cancelled", [True, RuntimeError("the server does not answer")])
def test_a_client_that_has_left_ends_its_generation(cancelled: bool | Exception) -> None:
    left, good = asked(), asked()
    engine, worker = started(left, good)
    left.cancelled = cancelled
    assert left.done.wait(60) and engine.cancelled == [0]
    engine.sinks[1](Event((5,), finish_reason=FinishReason.LENGTH, last=True))
    assert good.done.wait(60)
    worker.close()


def test_a_trace_counts_every_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[dict[str, Any]] = []
    tracer = SimpleNamespace(record=lambda given, *rest: found.append(given), close=lambda: None)
    monkeypatch.setattr(engine_worker, "open_tracer", lambda: tracer)
    client = asked(num_return_sequences=[2])
    engine, worker = started(client)
    for index, count in enumerate((3, 4)):
        metrics = RequestMetrics(1, prompt_tokens=2, output_tokens=count)
        reason = FinishReason.LENGTH
        engine.sinks[0](Event((5,), (), index, reason, last=index == 1, metrics=metrics))
    assert client.done.wait(60)
    worker.close()
    assert found[0]["gen_ai.usage.output_tokens"] == 7
    assert found[0]["gen_ai.response.finish_reasons"] == ["length", "length"]
