"""Service: the threads around one engine loop. One reads adapters, one makes text."""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from manylora.engine.loop import EngineLoop
from manylora.errors import (
    AdapterError,
    AdapterNotCachedError,
    AdapterNotFiniteError,
    ManyloraError,
    RequestError,
)
from manylora.llmapi.adapters import AdapterPath, AdapterRegistry, PathReader
from manylora.llmapi.generation import Generation
from manylora.lora.stored import StoredAdapter
from manylora.lora.tensors import Adapter
from manylora.request import Event, FinishReason, LoraInput
from manylora.system.thread_priority import step_back

__all__ = ["Service"]

SHUT_DOWN = "this LLM has been shut down"
CLOSING_S = 10.0  # that callers on their way in may take to be turned back

logger = logging.getLogger("manylora")


class Service:
    """Sends Generations through a loop. Any thread.

    An adapter that is in the cache is used by its id. Any other is read on a thread of its own and travels
    with the first request that needs it; the others follow by id. If one of these finds the adapter gone, it
    is sent again with the tensors, so an eviction never reaches the caller.

    resident:  whether a task id's adapter is in the cache now.
    max_bytes: tensors that may be on their way to the cache at one time, though never less than one adapter.
    """

    def __init__(
        self, loop: EngineLoop, reader: PathReader, resident: Callable[[int], bool], max_bytes: int
    ) -> None:
        self.registry = AdapterRegistry()
        self._loop = loop
        self._adapters = reader
        self._resident = resident
        self._carried = _Carried(max_bytes)
        self._reader = ThreadPoolExecutor(1, "manylora-read", step_back)
        self._lock = threading.Condition()  # notified when a request is forgotten
        self._tickets: dict[Generation, int | None] = {}  # open requests; None: not with the loop yet
        self._aborted: set[Generation] = set()  # before they were with the loop
        self._closed = False
        self._news: queue.SimpleQueue[tuple[Generation, Event] | None] = queue.SimpleQueue()
        self._texts = threading.Thread(target=self._run, name="manylora-text", daemon=True)
        self._texts.start()

    def submit(self, generation: Generation) -> None:
        """Raises RequestError after `close`; whatever else goes wrong comes as the generation's result."""
        with self._lock:
            if self._closed:
                raise RequestError(SHUT_DOWN)
            self._tickets[generation] = None
        task_id = generation.task_id
        if task_id is None or self._resident(task_id):
            self._send(generation, None if task_id is None else LoraInput(task_id))
        else:
            self._read_soon(generation, task_id, again=False)

    def discard(self, generation: Generation) -> None:
        """Let go of one that was made and is not submitted after all."""
        if generation.task_id is not None:
            self.registry.release(generation.task_id, accepted=False)

    def abort(self, generation: Generation) -> None:
        """End it. Without effect when it has ended."""
        with self._lock:
            ticket = self._tickets.get(generation)
            if ticket is None and generation in self._tickets:
                self._aborted.add(generation)
        if ticket is not None:
            self._loop.cancel(ticket)

    def close(self) -> None:
        """Cancel what is open, and end the threads. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            everyone = list(self._tickets)
        for generation in everyone:
            self.abort(generation)
        self._carried.open_up()
        self._reader.shutdown(wait=True)
        self._loop.close(drain=False)
        with self._lock:
            self._lock.wait_for(lambda: not self._tickets, CLOSING_S)
        self._news.put(None)
        self._texts.join()

    def _read_soon(self, generation: Generation, task_id: int, again: bool) -> None:
        generation.from_disk = True
        try:
            self._reader.submit(self._read, generation, task_id, again)
        except RuntimeError:  # closing
            self._end(generation, RequestError(SHUT_DOWN))

    def _read(self, generation: Generation, task_id: int, again: bool) -> None:
        """On the reading thread. again: the id alone was tried and did not do."""
        path = generation.path
        assert path is not None
        try:
            if not again and (self._resident(task_id) or self._carried.has(task_id)):
                self._send(generation, LoraInput(task_id))
            elif generation in self._aborted:
                self._send(generation, None)
            else:
                self._carry(generation, task_id, path)
        except ManyloraError as error:
            self._end(generation, error)
        except Exception as error:
            logger.exception("reading an adapter failed")
            self._end(generation, RequestError(f"The adapter could not be read: {type(error).__name__}"))

    def _carry(self, generation: Generation, task_id: int, path: AdapterPath) -> None:
        adapter = self._adapters.read(path)
        self._carried.add(generation, task_id, adapter)
        self._send(generation, LoraInput(task_id, checked=adapter))

    def _send(self, generation: Generation, lora: LoraInput | None) -> None:
        # Not the tensors themselves: the sink lives as long as the request.
        task_id = None if lora is None or lora.has_tensors else lora.task_id

        def sink(event: Event) -> None:
            if task_id is not None and isinstance(event.error, AdapterNotCachedError):
                self._send_again(generation, task_id)
            else:
                if event.last:
                    self._carried.drop(generation)
                self._news.put((generation, event))

        with self._lock:
            if generation not in self._aborted:
                try:
                    self._tickets[generation] = self._loop.submit(generation.request(lora), sink)
                    return
                except ManyloraError as error:
                    event = _last(error)
            else:
                event = Event(finish_reason=FinishReason.CANCELLED, last=True)
        sink(event)

    def _send_again(self, generation: Generation, task_id: int) -> None:
        with self._lock:
            if generation in self._tickets:
                self._tickets[generation] = None
        self._read_soon(generation, task_id, again=True)

    def _end(self, generation: Generation, error: Exception) -> None:
        self._carried.drop(generation)
        self._news.put((generation, _last(error)))

    def _run(self) -> None:
        """The text thread. It goes on whatever happens: everybody's answers go through it."""
        going = True
        while going:
            try:
                going = self._take_news()
            except Exception:
                logger.exception("an answer was lost")

    def _take_news(self) -> bool:
        """One event to its generation. A function of its own: what a thread that waits still has in its
        variables is kept alive, and a generation has its LLM."""
        news = self._news.get()
        if news is None:
            return False
        generation, event = news
        if event.last:  # first, so that who has the result finds the id of a bad adapter free again
            self._forget(generation, event)
        try:
            generation.take(event)
        except Exception as error:
            logger.exception("making text failed")
            generation.result.fail(RequestError(f"The text could not be made: {type(error).__name__}"))
        if generation.done and not event.last:  # by a stop text: the engine need not go on
            self.abort(generation)
        return True

    def _forget(self, generation: Generation, event: Event) -> None:
        with self._lock:
            self._tickets.pop(generation, None)
            self._aborted.discard(generation)
            self._lock.notify_all()
        if generation.task_id is not None:
            # One that overflows is in the cache, under its id.
            refused = isinstance(event.error, AdapterError)
            accepted = not refused or isinstance(event.error, AdapterNotFiniteError)
            self.registry.release(generation.task_id, accepted)


class _Carried:
    """Tensors of adapters on their way to the cache: how many bytes of them are in memory.

    They count until nobody holds them any more, the engine once they are stored being the last, or until the
    request that brought them has ended: an error may keep what it came from.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._changed = threading.Condition()
        self._requests: dict[Generation, tuple[int, int]] = {}  # task id, bytes

    def has(self, task_id: int) -> bool:
        with self._changed:
            return any(task_id == other for other, _ in list(self._requests.values()))

    def add(self, generation: Generation, task_id: int, adapter: Adapter | StoredAdapter) -> None:
        """Waits until there is room."""
        size = adapter.nbytes
        with self._changed:
            self._changed.wait_for(lambda: not self._requests or self._num_bytes + size <= self._max_bytes)
            self._requests[generation] = entry = (task_id, size)
            self._num_bytes += size
        weakref.finalize(adapter, self.drop, generation, entry).atexit = False

    def drop(self, generation: Generation, entry: tuple[int, int] | None = None) -> None:
        """entry: only if this is still what the request carries; None: whatever it is."""
        with self._changed:
            if entry is None or entry is self._requests.get(generation):
                self._num_bytes -= self._requests.pop(generation, (0, 0))[1]
            self._changed.notify_all()

    def open_up(self) -> None:
        """Let nobody wait any more."""
        with self._changed:
            self._max_bytes = 2**62
            self._changed.notify_all()


def _last(error: Exception) -> Event:
    return Event(finish_reason=FinishReason.ERROR, last=True, error=error)
