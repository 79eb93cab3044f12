"""Preparation: threads that read adapters and compile guides before the engine gets the requests."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from manylora.engine.engine import Engine
from manylora.engine.sequence_maker import Prepared
from manylora.errors import AdapterNotCachedError, RequestError
from manylora.request import Request
from manylora.system.threads import lower_priority

if TYPE_CHECKING:
    from llguidance import LLMatcher

logger = logging.getLogger("manylora")

GUIDE_THREADS = 8  # a guide may take seconds to compile


class Preparation:
    """Requests with tensors, or whose adapter must be read from disk, are prepared on one thread. Guides are
    compiled on other threads. A large adapter or guide therefore delays no other request.

    lock: protects everything that is changed here, and the caller's state. is_open: whether a request is not
    cancelled.
    begin: called under the lock with a request that needs no preparation. admit: called with the result of a
    preparation, without the lock.
    """

    def __init__(
        self,
        engine: Engine,
        lock: threading.Lock,
        is_open: Callable[[int], bool],
        begin: Callable[[int, Request, LLMatcher | None], None],
        admit: Callable[[int, Prepared | RequestError], None],
    ) -> None:
        self.num_waiting = 0  # requests in preparation or compilation, or waiting for it
        self._engine, self._lock = engine, lock
        self._is_open, self._begin, self._admit = is_open, begin, admit
        self._preparing: dict[int, int] = {}  # task id -> requests on the prepare thread
        self._preparer = ThreadPoolExecutor(1, "manylora-prepare", lower_priority)
        self._compilers = ThreadPoolExecutor(GUIDE_THREADS, "manylora-guide", lower_priority)

    def close(self) -> None:
        """Finish all waiting requests."""
        self._compilers.shutdown(wait=True)  # first, because it passes requests on to the prepare thread
        self._preparer.shutdown(wait=True)

    def dispatch(self, ticket: int, request: Request, matcher: LLMatcher | None = None) -> None:
        """Hand a request to the next thread. Call under the lock, so that no thread ends in between."""
        if request.params.guide is not None and matcher is None:
            self.num_waiting += 1
            self._compilers.submit(self._compile, ticket, request)
        elif not self.enter(ticket, request, matcher):
            self._begin(ticket, request, matcher)

    def enter(self, ticket: int, request: Request, matcher: LLMatcher | None) -> bool:
        """Hand a request to the prepare thread, if it needs that. Requests of one task id keep their order.
        Call under the lock.
        """
        lora = request.lora
        ids = lora.task_ids if lora is not None else []
        if lora is None or len(ids) < len(lora.members):  # an id is missing, which the engine reports
            return False
        if not (lora.has_tensors or any(map(self._must_prepare, ids))):
            return False
        try:
            self._preparer.submit(self._prepare, ticket, request, matcher)
        except RuntimeError:  # closed: the engine's thread prepares the rest
            return False
        self.num_waiting += 1
        for task_id in ids:
            self._preparing[task_id] = self._preparing.get(task_id, 0) + 1
        return True

    def _compile(self, ticket: int, request: Request) -> None:
        matcher: LLMatcher | None = None
        failure: RequestError | None = None
        if self._is_open(ticket):  # otherwise it was cancelled
            try:
                matcher = self._engine.compile(request)
            except BaseException as error:
                failure = as_refusal(error, "The guide could not be read")
        with self._lock:
            self.num_waiting -= 1
            if matcher is not None:
                self.dispatch(ticket, request, matcher)
        if failure is not None:
            self._admit(ticket, failure)

    def _must_prepare(self, task_id: int) -> bool:
        return task_id in self._preparing or not self._engine.adapters.resident(task_id)

    def _prepare(self, ticket: int, request: Request, matcher: LLMatcher | None) -> None:
        assert request.lora is not None
        ids = request.lora.task_ids
        prepared: Prepared | RequestError = Prepared(request, (None,) * len(ids), matcher)
        if self._is_open(ticket):  # otherwise it was cancelled
            try:
                if not request.lora.has_tensors:
                    self._engine.adapters.loader.wait_for_memory()
                prepared = self._engine.prepare(request, matcher)
            except AdapterNotCachedError:
                pass  # Its tensors may be ahead of it in the inbox: the engine thread will know.
            except BaseException as error:
                prepared = as_refusal(error, "The adapter could not be read")
        self._admit(ticket, prepared)
        with self._lock:
            self.num_waiting -= 1
            for task_id in ids:
                self._preparing[task_id] -= 1
                if not self._preparing[task_id]:
                    del self._preparing[task_id]


def as_refusal(error: BaseException, text: str) -> RequestError:
    """The error as a RequestError, without its traceback, which would keep an adapter in memory.

    Other errors are unexpected and logged. BaseException, because a panic of a Rust library is not an
    Exception.
    """
    if isinstance(error, RequestError):
        return error.with_traceback(None)
    logger.error("a request failed before it began", exc_info=error)
    return RequestError(f"{text}: {type(error).__name__}")
