"""EngineLoop: the one engine thread. Commands go in through a queue, events out through sinks."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from manylora.background import step_back
from manylora.config import EngineConfig
from manylora.engine.engine import Engine, Prepared
from manylora.errors import AdapterNotCachedError, DrainingError, EngineDeadError, RequestError
from manylora.request import Event, FinishReason, Request, Sink
from manylora.stats import CacheMap, EngineStats

__all__ = ["EngineLoop"]

logger = logging.getLogger("manylora")

Command = Callable[[], None]
STATS_S = 0.05


class EngineLoop:
    """Runs an Engine on a thread of its own until `close`.

    Requests that bring tensors, or whose adapter must be read from disk, are prepared on a second thread, so
    that checking a large adapter stalls nobody's tokens. If the engine thread dies, every open request gets
    one error event and later submits raise EngineDeadError.

    delivered: called, from any thread, after sinks were called: once for all events of a step.
    """

    def __init__(self, engine: Engine, delivered: Callable[[], None] = lambda: None) -> None:
        self._engine, self._delivered = engine, delivered
        self._stepping = False  # events are being delivered, and more of the same step follow
        self._lock = threading.Lock()
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._preparer = ThreadPoolExecutor(1, "manylora-prepare", step_back)
        self._sinks: dict[int, Sink] = {}  # ticket -> sink of every open request
        self._tickets: dict[int, int] = {}  # engine handle -> ticket; engine thread only
        self._handles: dict[int, int] = {}  # ticket -> engine handle; engine thread only
        self._preparing: dict[int, int] = {}  # task id -> requests on the preparing thread
        self._next_ticket = 0
        self._closing = False
        self._death: EngineDeadError | None = None
        self._stats, self._stats_at = engine.stats(), time.monotonic()
        self._thread = threading.Thread(target=self._run, name="manylora-engine", daemon=True)
        self._thread.start()

    @classmethod
    def start(cls, config: EngineConfig) -> EngineLoop:
        """Load the model and start. Raises ConfigError."""
        return cls(Engine(config))

    @property
    def alive(self) -> bool:
        return self._death is None and self._thread.is_alive()

    def submit(self, request: Request, sink: Sink) -> int:
        """Take a request and return a ticket for `cancel` at once.

        Whatever is wrong with the request comes to the sink as one last event. Raises EngineDeadError only.
        """
        unknown: RequestError | None = None
        if request.lora is not None and request.lora.name is not None:
            try:
                request = replace(request, lora=self._engine.adapters.resolve(request.lora))
            except RequestError as error:
                unknown = error
        with self._lock:
            if self._death:
                raise self._death
            ticket = self._next_ticket
            self._next_ticket += 1
            self._sinks[ticket] = sink
            closing = self._closing
            aside = not closing and unknown is None and self._enter_preparation(request)
        if closing or unknown:
            self._deliver(ticket, _failure(unknown or DrainingError()))
        elif aside:
            self._preparer.submit(self._prepare_aside, ticket, request)
        else:
            self._inbox.put(lambda: self._begin(ticket, request))
        return ticket

    def cancel(self, ticket: int) -> None:
        """End a request within a step; it gets its last event, with reason CANCELLED. Unknown: no effect."""
        self._inbox.put(lambda: self._cancel(ticket))

    def stats(self) -> EngineStats:
        """At most STATS_S old while the engine works, exact when it is idle. Any thread."""
        return self._stats

    def cache_map(self, take: Callable[[CacheMap], None]) -> None:
        """Have `take` called with the map, on the engine's thread between two steps. Not when it has died."""
        self._inbox.put(lambda: take(self._engine.adapters.map()))

    @property
    def has_encoder(self) -> bool:
        """Whether prompts go to an encoder, and its decoder has one of its own."""
        return self._engine.model.encoder is not None

    @property
    def num_open(self) -> int:
        """Requests whose last event has not gone out yet."""
        return len(self._sinks)

    def close(self, drain: bool = True) -> None:
        """Take nothing new; finish what is open (or cancel it), then end the threads. Idempotent."""
        with self._lock:
            self._closing = True
        self._preparer.shutdown(wait=True)
        if not drain:
            for ticket in list(self._sinks):
                self.cancel(ticket)
        self._inbox.put(lambda: None)
        self._thread.join()
        self._engine.adapters.close()

    def _enter_preparation(self, request: Request) -> bool:
        """Whether the preparing thread goes first. Requests of a task id in preparation keep their order."""
        lora = request.lora
        if lora is None or lora.task_id is None:
            return False
        if not (
            lora.has_tensors
            or lora.task_id in self._preparing
            or not self._engine.adapters.resident(lora.task_id)
        ):
            return False
        self._preparing[lora.task_id] = self._preparing.get(lora.task_id, 0) + 1
        return True

    def _prepare_aside(self, ticket: int, request: Request) -> None:
        assert request.lora is not None and request.lora.task_id is not None
        task_id = request.lora.task_id
        try:
            prepared: Prepared | RequestError = self._engine.prepare(request)
        except AdapterNotCachedError:
            # Its tensors may be ahead of it in the inbox: the engine thread knows.
            prepared = Prepared(request, None)
        except RequestError as error:
            prepared = error
        except Exception as error:
            logger.exception("preparing a request failed")
            prepared = RequestError(f"The adapter could not be read: {type(error).__name__}")
        self._inbox.put(lambda: self._admit(ticket, prepared))
        with self._lock:
            self._preparing[task_id] -= 1
            if not self._preparing[task_id]:
                del self._preparing[task_id]

    # From here on: the engine thread.

    def _run(self) -> None:
        try:
            while self._take_commands():
                events = self._engine.step()
                self._stepping = True
                for handle, event in events:
                    self._forward(handle, event)
                self._stepping = False
                self._delivered()
                if time.monotonic() - self._stats_at > STATS_S:
                    self._take_stats()
        except BaseException as error:
            logger.critical("the engine thread died", exc_info=True)
            self._die(EngineDeadError(f"The engine stopped: {type(error).__name__}"))

    def _take_commands(self) -> bool:
        """Run what is in the inbox, waiting for something to do. False: closed and nothing left."""
        while not self._engine.has_work:
            with self._lock:
                done = self._closing and not self._sinks
            if done and self._inbox.empty():
                return False
            self._take_stats()
            self._inbox.get()()
        while True:
            try:
                self._inbox.get_nowait()()
            except queue.Empty:
                return True

    def _take_stats(self) -> None:
        self._stats, self._stats_at = self._engine.stats(), time.monotonic()

    def _begin(self, ticket: int, request: Request) -> None:
        try:
            self._admit(ticket, self._engine.prepare(request))
        except RequestError as error:
            self._admit(ticket, error)

    def _admit(self, ticket: int, prepared: Prepared | RequestError) -> None:
        if ticket not in self._sinks:  # cancelled while it was prepared
            return
        try:
            if isinstance(prepared, RequestError):
                raise prepared
            handle = self._engine.submit(prepared)
        except RequestError as error:
            self._deliver(ticket, _failure(error))
            return
        self._tickets[handle] = ticket
        self._handles[ticket] = handle

    def _cancel(self, ticket: int) -> None:
        handle = self._handles.get(ticket)
        if handle is not None:
            for _, event in self._engine.cancel(handle):
                self._forward(handle, event)
        elif ticket in self._sinks:
            self._deliver(ticket, Event(finish_reason=FinishReason.CANCELLED, last=True))

    def _forward(self, handle: int, event: Event) -> None:
        ticket = self._tickets[handle]
        if event.last:
            del self._tickets[handle], self._handles[ticket]
        self._deliver(ticket, event)

    def _deliver(self, ticket: int, event: Event) -> None:
        sink = self._sinks.pop(ticket) if event.last else self._sinks[ticket]
        try:
            sink(event)
        except Exception:
            logger.exception("a sink failed")
        if not self._stepping:
            self._delivered()

    def _die(self, death: EngineDeadError) -> None:
        with self._lock:
            self._death = death
            orphans = list(self._sinks)
        self._stepping = False
        for ticket in orphans:
            self._deliver(ticket, _failure(death))
        self._delivered()


def _failure(error: Exception) -> Event:
    return Event(finish_reason=FinishReason.ERROR, last=True, error=error)
