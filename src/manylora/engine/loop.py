"""EngineLoop: the engine's thread. Commands arrive through a queue, and events leave through sinks. Other
threads read adapters and compile guides before the engine gets a request.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from manylora.config.engine import EngineConfig
from manylora.engine.build import TAGS
from manylora.engine.engine import MOST_SAVED, Engine, open_engine
from manylora.engine.requests import Prepared
from manylora.errors import (
    AdapterNotCachedError,
    ConfigError,
    DrainingError,
    EngineDeadError,
    GroupLostError,
    QueueFullError,
    RequestError,
    SleepingError,
)
from manylora.request import AdapterVersion, Event, FinishReason, LoraInput, Request, Sink
from manylora.stats import CacheMap, EngineStats
from manylora.system.threads import lower_priority

if TYPE_CHECKING:
    from llguidance import LLMatcher

logger = logging.getLogger("manylora")

T = TypeVar("T")
Command = Callable[[], None]
GUIDE_THREADS = 8  # a guide may take seconds to compile
STATS_S = 0.05
SAVED_WHILE_BUSY = 2  # KV blocks that are copied to the store each STATS_S
STUCK_S = 1.0  # how long `close` waits for a thread that is stuck


class EngineLoop:
    """Runs an Engine on a separate thread until `close`.

    Requests with tensors, or whose adapter must be read from disk, are prepared on one thread. Guides are
    compiled on other threads. A large adapter or guide therefore delays no other request.

    If the engine thread dies, or `fail` declares it dead, every open request gets one error event, and later
    submits raise EngineDeadError. An error in one request never ends the thread.

    delivered: called after the sinks, once for all events of a step. It may be called on any thread.
    death: why nothing will be answered any more; None also after `close`. has_encoder, max_seq_len: as in
    `Engine`.
    """

    def __init__(self, engine: Engine, delivered: Callable[[], None] = lambda: None) -> None:
        self._engine, self._delivered = engine, delivered
        self.has_encoder, self.max_seq_len = engine.has_encoder, engine.max_seq_len
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._preparer = ThreadPoolExecutor(1, "manylora-prepare", lower_priority)
        self._compilers = ThreadPoolExecutor(GUIDE_THREADS, "manylora-guide", lower_priority)
        # Changed by any thread, under the lock.
        self._lock = threading.Lock()
        self._sinks: dict[int, Sink] = {}  # ticket -> sink of every open request
        self._next_ticket = 0
        self._num_prepared = 0  # requests on the preparing and compiling threads, or waiting for these
        self._preparing: Counter[int] = Counter()  # task id -> requests on the preparing thread
        self._closing = False
        self.is_sleeping = False  # requests are refused
        self._to_sleep: list[tuple[int, Future[None]]] = []  # until open requests have ended
        self.death: EngineDeadError | None = None
        self._promised: set[Future[Any]] = set()  # of `publish`, `sleep` and `wake_up`
        # Changed by the engine thread only.
        self._tickets: dict[int, int] = {}  # engine handle -> ticket
        self._handles: dict[int, int] = {}  # ticket -> engine handle
        self._delivering = False  # whether events of a step are being delivered
        self._idle, self._turn_at = False, time.monotonic()
        self._stats, self._stats_at = engine.stats(), time.monotonic()
        self._thread = threading.Thread(target=self._run, name="manylora-engine", daemon=True)
        self._thread.start()
        engine.on_loss(self.fail)

    @classmethod
    def start(cls, config: EngineConfig) -> EngineLoop:
        """Load the model and start, as `open_engine` does. Raises ConfigError."""
        return cls(open_engine(config))

    @property
    def alive(self) -> bool:
        return self.death is None and self._thread.is_alive()

    @property
    def stalled_s(self) -> float:
        """Seconds since the engine thread started its current step. 0: it waits for work."""
        return 0.0 if self._idle else time.monotonic() - self._turn_at

    @property
    def num_open(self) -> int:
        """Requests whose last event has not been delivered yet."""
        return len(self._sinks)

    def fail(self, reason: str) -> None:
        """Treat the engine thread as dead because it is stuck. Thread-safe."""
        self._die(EngineDeadError(f"The engine stopped: {reason}"))

    def _call(self, action: Callable[[], T], failed: str) -> Future[T]:
        """The result of an action on the engine's thread, before later requests, or why it failed: a
        RequestError or EngineDeadError. failed: starts the text of an unexpected error. Raises DrainingError
        and EngineDeadError.
        """
        done: Future[T] = self._promise()
        self._inbox.put(lambda: self._keep(done, action, failed))
        return done

    def _promise(self) -> Future[Any]:
        """A result that `_keep` or `_die` will give. Raises DrainingError and EngineDeadError."""
        done: Future[Any] = Future()
        done.set_running_or_notify_cancel()  # from here on nobody who waits for it can cancel it
        with self._lock:
            if self.death:
                raise self.death
            if self._closing:
                raise DrainingError()
            self._promised.add(done)
        return done

    def submit(self, request: Request, sink: Sink) -> int:
        """Queue a request. Returns a ticket for `cancel`. An error in it is its only event. Raises
        EngineDeadError.
        """
        refusal: RequestError | None = None
        try:
            request = self._engine.resolve(request)
        except RequestError as error:
            refusal = error
        with self._lock:
            if self.death:
                raise self.death
            ticket = self._next_ticket
            self._next_ticket += 1
            limit = self._engine.max_queue_size
            if self._closing:
                refusal = refusal or DrainingError()
            elif self.is_sleeping:
                refusal = refusal or SleepingError()
            elif limit and self._num_prepared >= limit:
                refusal = refusal or QueueFullError(limit)
            if refusal is None:
                self._sinks[ticket] = sink
                self._dispatch(ticket, request)
        if refusal is not None:
            self._tell(sink, _failure(refusal))
        return ticket

    def cancel(self, ticket: int) -> None:
        """End a request within a step, with a last event. No effect for an unknown ticket."""

        def cancel() -> None:
            handle = self._handles.get(ticket)
            if handle is not None:
                for _, event in self._engine.cancel(handle):
                    self._forward(handle, event)
            elif ticket in self._sinks:
                self._deliver(ticket, Event(finish_reason=FinishReason.CANCELLED, last=True))

        self._inbox.put(cancel)

    def publish(self, lora: LoraInput) -> Future[AdapterVersion]:
        """As `Engine.publish`. This and what follows: see `_call`."""
        return self._call(partial(self._engine.publish, lora), "The adapter could not be taken")

    def stats(self) -> EngineStats:
        """At most STATS_S old while the engine works, exact from the last answer on. Thread-safe."""
        return self._stats

    def cache_map(self) -> Future[CacheMap]:
        """The adapter on each page of the cache."""
        return self._call(self._engine.adapters.map, "The adapter cache could not be read")

    def reset_prefix_cache(self, digest: str | None) -> None:
        """As `Engine.reset_prefix_cache`, before later requests."""
        self._inbox.put(partial(self._engine.reset_prefix_cache, digest))

    def pin(self, task_id: int) -> Future[None]:
        """Keep an adapter that is in the cache there, as `AdapterStore.pin`."""
        return self._call(partial(self._engine.adapters.pin, task_id), "The adapter could not be pinned")

    def unpin(self, task_id: int) -> None:
        """Allow its eviction again. No effect for an unknown id."""
        self._inbox.put(partial(self._engine.adapters.unpin, task_id))

    def sleep(self, level: int = 1) -> Future[None]:
        """Refuse requests from now on, and free memory as `Engine.sleep` when the open ones have ended. May
        raise RequestError and EngineDeadError.
        """
        done: Future[None] = self._promise()
        with self._lock:
            self.is_sleeping = True
            self._to_sleep.append((level, done))
        self._inbox.put(self._try_to_sleep)
        return done

    def wake_up(self, tags: Sequence[str] | None = None) -> Future[None]:
        """Get the memory back that `sleep` freed. tags: parts of `build.TAGS`; requests are taken again
        after the last of them. None: all. May raise RequestError, ConfigError and EngineDeadError.
        """
        wrong = next((one for one in tags or () if one not in TAGS), None)
        if wrong is not None:
            raise RequestError(f"tags must be of {', '.join(TAGS)}, got {wrong!r}")
        done: Future[None] = self._promise()

        def wake() -> None:
            with self._lock:
                waiting, self._to_sleep = self._to_sleep, []
            for _, other in waiting:
                self._end(other, RequestError("wake_up was called before the engine slept"))
            self._change(done, partial(self._engine.wake_up, set(TAGS if tags is None else tags)))

        self._inbox.put(wake)
        return done

    def close(self, drain: bool = True) -> None:
        """Refuse new requests, finish (or cancel) open ones, then end the threads. Idempotent."""
        with self._lock:
            self._closing = True
            everyone = list(self._sinks)
        if not drain:
            self._engine.end_waits()
            for ticket in everyone:
                self.cancel(ticket)
        self._compilers.shutdown(wait=True)  # first, because it passes requests on to the preparing thread
        self._preparer.shutdown(wait=True)
        self._inbox.put(lambda: None)
        self._thread.join(None if self.death is None else STUCK_S)
        if not self._thread.is_alive():
            self._engine.close()

    # Preparation. These methods are called on any thread.

    def _dispatch(self, ticket: int, request: Request, matcher: LLMatcher | None = None) -> None:
        """Hand a request to the next thread. Call under the lock, so that no thread ends in between."""
        if request.params.guide is not None and matcher is None:
            self._num_prepared += 1
            self._compilers.submit(self._compile, ticket, request)
        elif not self._enter(ticket, request, matcher):
            self._inbox.put(partial(self._begin, ticket, request, matcher))

    def _enter(self, ticket: int, request: Request, matcher: LLMatcher | None) -> bool:
        """Hand a request to the preparing thread, if it needs that. Call under the lock."""
        lora = request.lora
        ids = lora.task_ids if lora is not None else []
        if lora is None or len(ids) < len(lora.members):  # an id is missing, which the engine reports
            return False
        missing = (one for one in ids if one in self._preparing or not self._engine.adapters.resident(one))
        if not lora.has_tensors and next(missing, None) is None:
            return False
        try:
            self._preparer.submit(self._prepare, ticket, request, matcher, time.monotonic_ns())
        except RuntimeError:  # closed: the engine's thread prepares the rest
            return False
        self._num_prepared += 1
        self._preparing.update(ids)
        return True

    def _compile(self, ticket: int, request: Request) -> None:
        matcher: LLMatcher | None = None
        failure: RequestError | None = None
        if ticket in self._sinks:  # otherwise it was cancelled
            try:
                matcher = self._engine.compile(request)
            except BaseException as error:
                failure = as_refusal(error, "The guide could not be read")
        with self._lock:
            self._num_prepared -= 1
            if matcher is not None:
                self._dispatch(ticket, request, matcher)
        if failure is not None:
            self._inbox.put(partial(self._admit, ticket, failure))

    def _prepare(self, ticket: int, request: Request, matcher: LLMatcher | None, since_ns: int) -> None:
        assert request.lora is not None
        ids = request.lora.task_ids
        prepared: Prepared | RequestError = Prepared(request, (None,) * len(ids), matcher)
        if ticket in self._sinks:  # otherwise it was cancelled
            try:
                if not request.lora.has_tensors:
                    self._engine.wait_for_memory()
                prepared = self._engine.prepare(request, matcher)
                prepared.read_ns = time.monotonic_ns() - since_ns
            except AdapterNotCachedError:
                pass  # Its tensors may be ahead of it in the inbox: the engine thread will know.
            except BaseException as error:
                prepared = as_refusal(error, "The adapter could not be read")
        self._inbox.put(partial(self._admit, ticket, prepared))
        with self._lock:
            self._num_prepared -= 1
            for task_id in ids:
                self._preparing[task_id] -= 1
                if not self._preparing[task_id]:
                    del self._preparing[task_id]

    # Methods of the engine thread.

    def _run(self) -> None:
        try:
            while self._take_commands():
                self._turn_at = time.monotonic()
                events = self._engine.step()
                if not self._engine.has_work:  # a client that has its answer finds it counted
                    self._take_stats()
                self._delivering = True
                for handle, event in events:
                    self._forward(handle, event)
                self._delivering = False
                self._delivered()
                if time.monotonic() - self._stats_at > STATS_S:
                    self._take_stats()
                    self._engine.adapters.make_ready(lambda: self._idle)
                    self._engine.save_blocks(SAVED_WHILE_BUSY)
        except BaseException as error:
            if self.death is not None:  # it was declared dead before
                return
            known = isinstance(error, GroupLostError)
            logger.critical("the engine thread died", exc_info=not known)
            reason = str(error) if known else type(error).__name__
            self._die(EngineDeadError(f"The engine stopped: {reason}"))

    def _take_commands(self) -> bool:
        """Run the commands, and wait while there is no work. False: closed and done, or dead."""
        while not self._engine.has_work:
            with self._lock:
                done = self._closing and not (self._sinks or self._promised)
            if self.death is not None or (done and self._inbox.empty()):
                return False
            while self._inbox.empty() and self._engine.save_blocks(MOST_SAVED):
                self._turn_at = time.monotonic()
            self._take_stats()
            self._idle = True
            self._engine.adapters.make_ready(lambda: self._idle)
            command = self._inbox.get()
            self._turn_at, self._idle = time.monotonic(), False
            command()
        while not self._inbox.empty():  # no other thread takes from it
            self._inbox.get()()
        return self.death is None

    def _try_to_sleep(self) -> None:
        """Once no request is open."""
        while self._to_sleep and not self._sinks:
            level, done = self._to_sleep.pop(0)
            self._change(done, partial(self._engine.sleep, level))

    def _change(self, done: Future[None], action: Command) -> None:
        """Fall asleep or wake. It may take as long as a start, so the thread does not count as stuck."""
        self._idle = True
        self._keep(done, action, "The engine's memory could not be changed")
        self._turn_at, self._idle = time.monotonic(), False

    def _keep(self, done: Future[Any], action: Callable[[], Any], failed: str) -> None:
        """Answer what `_promise` made. failed: as in `_call`."""
        result: Any = None
        failure: Exception | None = None
        try:
            result = action()
        except ConfigError as error:
            failure = error
        except Exception as error:
            failure = as_refusal(error, failed)
        with self._lock:
            self.is_sleeping = self._engine.is_asleep or bool(self._to_sleep)
        self._end(done, failure, result)

    def _end(self, done: Future[Any], failure: Exception | None, result: Any = None) -> None:
        with self._lock:
            is_open = done in self._promised  # otherwise `_die` has ended it
            self._promised.discard(done)
        if is_open and failure is not None:
            done.set_exception(failure)
        elif is_open:
            done.set_result(result)

    def _take_stats(self) -> None:
        self._stats, self._stats_at = self._engine.stats(), time.monotonic()

    def _begin(self, ticket: int, request: Request, matcher: LLMatcher | None) -> None:
        if ticket not in self._sinks:  # cancelled
            return
        with self._lock:
            if self._enter(ticket, request, matcher):  # its adapter was evicted meanwhile
                return
        try:
            self._admit(ticket, self._engine.prepare(request, matcher))
        except Exception as error:
            self._admit(ticket, as_refusal(error, "The request could not be checked"))

    def _admit(self, ticket: int, prepared: Prepared | RequestError) -> None:
        if ticket not in self._sinks:  # cancelled while it was prepared
            return
        try:
            if isinstance(prepared, RequestError):
                raise prepared
            handle = self._engine.submit(prepared)
        except Exception as error:
            self._deliver(ticket, _failure(as_refusal(error, "The request could not be taken")))
            return
        self._tickets[handle] = ticket
        self._handles[ticket] = handle

    def _forward(self, handle: int, event: Event) -> None:
        ticket = self._tickets[handle]
        if event.last:
            del self._tickets[handle], self._handles[ticket]
        self._deliver(ticket, event)

    def _deliver(self, ticket: int, event: Event) -> None:
        sink = self._sinks.get(ticket)
        if event.last:
            with self._lock:
                sink = self._sinks.pop(ticket, None)
            if self._to_sleep and not self._sinks:
                self._inbox.put(self._try_to_sleep)
        if sink is not None:  # otherwise `_die` has called it
            self._tell(sink, event)

    def _tell(self, sink: Sink, event: Event) -> None:
        try:
            sink(event)
        except Exception:
            logger.exception("a sink failed")
        if not self._delivering:
            self._delivered()

    def _die(self, death: EngineDeadError) -> None:
        with self._lock:
            self.death = self.death or death
            orphans, self._sinks = self._sinks, {}
            promised, self._promised = self._promised, set()
        for done in promised:
            done.set_exception(death)
        self._engine.end_waits()
        self._delivering = True  # so that `_delivered` is called once, after every sink
        for sink in orphans.values():
            self._tell(sink, _failure(death))
        self._delivering = False
        self._delivered()


def _failure(error: Exception) -> Event:
    return Event(finish_reason=FinishReason.ERROR, last=True, error=error)


def as_refusal(error: BaseException, text: str) -> RequestError:
    """The error as a RequestError, without its traceback, which would keep an adapter in memory. Unexpected
    ones are logged. BaseException: a panic of a Rust library.
    """
    if isinstance(error, RequestError):
        return error.with_traceback(None)
    logger.error("a request failed before it began", exc_info=error)
    return RequestError(f"{text}: {type(error).__name__}")
