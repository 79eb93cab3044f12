"""Protects the engine thread: exactly one last event for every request, through death, drain and cancel."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest

from manylora.engine.loop import EngineLoop
from manylora.errors import DrainingError, EngineDeadError, QueueFullError, RequestError
from manylora.request import Event, FinishReason, Guide, LoraInput, Request, SamplingConfig
from manylora.stats import EngineStats


class FakeEngine:
    """Answers each request with `max_tokens` tokens, one a step; the prompt (13,) kills it."""

    def __init__(self) -> None:
        self.open: dict[int, list] = {}
        self.handles = iter(range(10**6))
        self.gate = threading.Event()
        self.gate.set()
        self.known: set[int] = set()
        self.adapters = SimpleNamespace(resident=self.known.__contains__, make_ready=lambda is_idle: None)
        self.order: list[tuple[int, bool]] = []
        self.num_ended = 0

    @property
    def has_work(self) -> bool:
        return bool(self.open)

    max_queue_size, max_seq_len, has_encoder = 0, 64, False

    def prepare(self, request: Request, matcher=None):
        if request.lora and request.lora.has_tensors:
            self.gate.wait(60)
        return SimpleNamespace(request=request, adapter=None)

    def compile(self, request: Request):
        return object()

    def submit(self, prepared) -> int:
        request = prepared.request
        if request.prompt == (0,):
            raise RequestError("no")
        if request.lora:
            self.order.append((request.lora.task_id, request.lora.has_tensors))
            self.known.add(request.lora.task_id)
        handle = next(self.handles)
        self.open[handle] = [request, 0]
        return handle

    def cancel(self, handle: int):
        if self.open.pop(handle, None) is None:
            return []
        return [(handle, Event(finish_reason=FinishReason.CANCELLED, last=True))]

    def step(self):
        events = []
        for handle, state in list(self.open.items()):
            if state[0].prompt == (13,):
                raise MemoryError
            state[1] += 1
            last = state[1] == state[0].params.max_tokens
            events.append(
                (handle, Event((state[1],), last=last, finish_reason=FinishReason.LENGTH if last else None))
            )
            if last:
                del self.open[handle]
                self.num_ended += 1
        return events

    def stats(self) -> EngineStats:
        return EngineStats(requests_finished=self.num_ended)

    def on_loss(self, lost: Callable[[str], None]) -> None:
        self.lost = lost

    def resolve(self, request: Request) -> Request:
        return request

    def save_blocks(self, most: int) -> bool:
        return False

    wait_for_memory = end_waits = close = lambda self: None


class Sink:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.done = threading.Event()

    def __call__(self, event: Event) -> None:
        assert not self.done.is_set(), "an event after the last one"
        self.events.append(event)
        if event.last:
            self.done.set()

    def wait(self) -> Event:
        assert self.done.wait(60)
        return self.events[-1]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def loop(engine: FakeEngine):
    made = EngineLoop(engine)  # type: ignore[arg-type]
    yield made
    made.close(drain=False)


def request(n: int = 3, prompt: tuple[int, ...] = (1,), lora: LoraInput | None = None) -> Request:
    return Request(prompt, SamplingConfig(max_tokens=n), lora=lora, streaming=True)


def test_many_threads_each_get_their_own_answer(loop: EngineLoop) -> None:
    sinks = [Sink() for _ in range(50)]
    threads = [threading.Thread(target=loop.submit, args=(request(i + 1), s)) for i, s in enumerate(sinks)]
    for thread in threads:
        thread.start()
    for i, sink in enumerate(sinks):
        sink.wait()
        assert [t for e in sink.events for t in e.token_ids] == list(range(1, i + 2))
    assert loop.num_open == 0


def test_who_has_the_last_answer_finds_it_in_the_statistics(loop: EngineLoop) -> None:
    for count in range(1, 20):
        seen: list[int] = []
        sink = Sink()

        def take(event: Event, sink: Sink = sink, seen: list[int] = seen) -> None:
            seen.append(loop.stats().requests_finished)
            sink(event)

        loop.submit(request(), take)
        sink.wait()
        assert seen[-1] == count


def test_errors_and_cancelling(loop: EngineLoop) -> None:
    bad, endless = Sink(), Sink()
    loop.submit(request(prompt=(0,)), bad)
    assert isinstance(bad.wait().error, RequestError)
    ticket = loop.submit(request(10**9), endless)
    loop.cancel(ticket)
    assert endless.wait().finish_reason is FinishReason.CANCELLED
    loop.cancel(ticket)
    loop.cancel(12345)
    after = Sink()
    loop.submit(request(), after)
    assert after.wait().finish_reason is FinishReason.LENGTH


def test_draining_finishes_what_is_open_and_takes_nothing_new(engine: FakeEngine) -> None:
    loop = EngineLoop(engine)  # type: ignore[arg-type]
    sink, late = Sink(), Sink()
    loop.submit(request(2000), sink)
    loop.close()
    assert sink.wait().finish_reason is FinishReason.LENGTH
    loop.submit(request(), late)
    assert isinstance(late.wait().error, DrainingError)


class Stuck(FakeEngine):
    """Stands still in its first step until `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.go = threading.Event(), threading.Event()

    def step(self):
        self.inside.set()
        assert self.go.wait(60)
        return super().step()


class Panic(BaseException):
    """As libraries in Rust raise."""


@pytest.mark.parametrize(
    ("verb", "kind"),
    [("prepare", Panic), ("compile", Panic), ("submit", ValueError)],
)
def test_what_no_check_foresaw_ends_one_request_and_not_the_engine(
    loop: EngineLoop, engine: FakeEngine, verb: str, kind: type[BaseException], monkeypatch
) -> None:
    import numpy as np

    def fail(*_: object) -> None:
        raise kind

    guide = Guide("json") if verb == "compile" else None
    lora = LoraInput(1, np.zeros(1), np.zeros(1)) if verb == "prepare" else None
    bad, good = Sink(), Sink()
    with monkeypatch.context() as patch:
        patch.setattr(engine, verb, fail)
        loop.submit(replace(request(lora=lora), params=SamplingConfig(max_tokens=1, guide=guide)), bad)
        assert kind.__name__ in str(bad.wait().error)
    loop.submit(request(), good)
    assert good.wait().finish_reason is FinishReason.LENGTH


def test_requests_that_are_prepared_count_as_waiting(engine: FakeEngine) -> None:
    import numpy as np

    engine.max_queue_size = 3
    loop = EngineLoop(engine)  # type: ignore[arg-type]
    engine.gate.clear()
    sinks = [Sink() for _ in range(5)]
    for i, sink in enumerate(sinks):
        loop.submit(request(lora=LoraInput(i, np.zeros(1), np.zeros(1))), sink)
    assert all(isinstance(sink.wait().error, QueueFullError) for sink in sinks[3:])
    engine.gate.set()
    assert [sink.wait().error for sink in sinks[:3]] == [None] * 3
    loop.close()


def test_a_server_whose_engine_is_stuck_gives_it_up_and_says_nothing_afterwards(monkeypatch) -> None:
    from manylora.doors.http import server as openai_server

    monkeypatch.setattr(openai_server, "WATCH_S", 0.02)
    monkeypatch.setattr(openai_server, "STALLED_S", 0.1)
    engine, sinks, reasons = Stuck(), [Sink(), Sink()], queue.SimpleQueue()
    engine.model = SimpleNamespace(encoder=None)
    server = openai_server.InProcessEngine(engine, 0.3, reasons.put)  # type: ignore[arg-type]
    assert server.alive
    for sink in sinks:
        server.submit(request(), sink)
    assert engine.inside.wait(60)
    while server.alive:
        threading.Event().wait(0.01)
    assert "has not moved" in reasons.get(timeout=60)
    for sink in sinks:
        assert isinstance(sink.wait().error, EngineDeadError) and "has not moved" in str(sink.wait().error)
    with pytest.raises(EngineDeadError):
        server.submit(request(), Sink())
    engine.go.set()  # it wakes up after all: a Sink asserts that nothing follows its last event
    asyncio.run(server.close())
    assert server.loop.num_open == 0
