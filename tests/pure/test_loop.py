"""Protects the engine thread: exactly one last event for every request, through death, drain and cancel."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from manylora.engine.engine import Engine
from manylora.errors import DrainingError, EngineDeadError, RequestError
from manylora.loop import EngineLoop
from manylora.request import Event, FinishReason, LoraInput, Request, SamplingParams
from manylora.stats import EngineStats


class FakeEngine:
    """Answers each request with `max_tokens` tokens, one a step; the prompt (13,) kills it."""

    def __init__(self) -> None:
        self.open: dict[int, list] = {}
        self.handles = iter(range(10**6))
        self.gate = threading.Event()
        self.gate.set()
        self.known: set[int] = set()
        self.order: list[tuple[int, bool]] = []
        self.adapters = SimpleNamespace(resident=lambda task_id: task_id in self.known, close=lambda: None)

    @property
    def has_work(self) -> bool:
        return bool(self.open)

    def prepare(self, request: Request):
        if request.lora and request.lora.has_tensors:
            self.gate.wait(5)
        return SimpleNamespace(request=request, adapter=None)

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
        return events

    def stats(self) -> EngineStats:
        return EngineStats()


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
        assert self.done.wait(10)
        return self.events[-1]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def loop(engine: FakeEngine):
    made = EngineLoop(engine)  # type: ignore[arg-type]
    yield made
    made.close(drain=False)
    assert not made._thread.is_alive()


def request(n: int = 3, prompt: tuple[int, ...] = (1,), lora: LoraInput | None = None) -> Request:
    return Request(prompt, SamplingParams(max_tokens=n), lora=lora, streaming=True)


def test_many_threads_each_get_their_own_answer(loop: EngineLoop) -> None:
    sinks = [Sink() for _ in range(50)]
    threads = [threading.Thread(target=loop.submit, args=(request(i + 1), s)) for i, s in enumerate(sinks)]
    for thread in threads:
        thread.start()
    for i, sink in enumerate(sinks):
        sink.wait()
        assert [t for e in sink.events for t in e.token_ids] == list(range(1, i + 2))
    assert loop.num_open == 0


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


def test_a_slow_adapter_holds_up_only_its_own_task_id(loop: EngineLoop, engine: FakeEngine) -> None:
    import numpy as np

    engine.gate.clear()
    tensors = LoraInput(1, np.zeros(1), np.zeros(1))
    first, second, other = Sink(), Sink(), Sink()
    loop.submit(request(lora=tensors), first)
    loop.submit(request(lora=LoraInput(1)), second)
    loop.submit(request(), other)
    other.wait()
    assert not first.events
    assert not second.events
    engine.gate.set()
    first.wait()
    second.wait()
    assert engine.order == [(1, True), (1, False)]


def test_cancelled_while_it_is_prepared(loop: EngineLoop, engine: FakeEngine) -> None:
    import numpy as np

    engine.gate.clear()
    sink = Sink()
    ticket = loop.submit(request(lora=LoraInput(1, np.zeros(1), np.zeros(1))), sink)
    loop.cancel(ticket)
    assert sink.wait().finish_reason is FinishReason.CANCELLED
    engine.gate.set()


def test_the_death_of_the_engine_reaches_every_client(loop: EngineLoop) -> None:
    sinks = [Sink() for _ in range(5)]
    for sink in sinks:
        loop.submit(request(10**9), sink)
    loop.submit(request(prompt=(13,)), Sink())
    for sink in sinks:
        assert isinstance(sink.wait().error, EngineDeadError)
    with pytest.raises(EngineDeadError):
        loop.submit(request(), Sink())
    assert not loop.alive


def test_draining_finishes_what_is_open_and_takes_nothing_new(engine: FakeEngine) -> None:
    loop = EngineLoop(engine)  # type: ignore[arg-type]
    sink, late = Sink(), Sink()
    loop.submit(request(2000), sink)
    loop.close()
    assert sink.wait().finish_reason is FinishReason.LENGTH
    loop.submit(request(), late)
    assert isinstance(late.wait().error, DrainingError)


def test_the_fake_has_the_engine_s_verbs() -> None:
    verbs = ("prepare", "submit", "cancel", "step", "stats", "has_work")
    assert all(hasattr(Engine, verb) and hasattr(FakeEngine, verb) for verb in verbs)
