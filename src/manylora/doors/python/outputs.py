"""What an LLM returns: RequestOutput; GenerationResult, its future and stream; pooled outputs."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from manylora.doors.python.llm_args import LoRAChoice
from manylora.generation.outputs import CompletionOutput
from manylora.request import RequestMetrics


@dataclass(frozen=True)
class RequestTimings:
    """Seconds since the request was created; None: not yet. first_token: published, or else generated."""

    first_token: float | None = None
    finished: float | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A prompt with its n outputs in their current state.

    prompt: None for token ids. prompt_token_ids: after truncation. adapter_tier: where the adapter was found:
    "device", "host" or "disk"; empty without one. metrics: the engine's, of the sequence that ended last.
    context_logits: [prompt, vocabulary] float32, if requested.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    lora_request: LoRAChoice | None = None
    timings: RequestTimings = field(default_factory=RequestTimings)
    adapter_tier: str = ""
    metrics: RequestMetrics | None = None
    context_logits: np.ndarray | None = field(default=None, compare=False)


class GenerationResult:
    """Returned by `generate_async`. Usable from any thread and any event loop. Raises the request's error.

    `await result` and `result.result()` return the finished RequestOutput. `async for` and `for` yield a
    RequestOutput per step when streaming, otherwise only the finished one. Each output goes to one iterator.
    """

    def __init__(self, request_id: int, abort: Callable[[], None]) -> None:
        self.request_id = request_id
        self._abort = abort
        self._lock = threading.Lock()
        self._outputs: deque[RequestOutput] = deque()
        self._waiters: list[Future[None]] = []  # of iterators without an output
        self._result: Future[RequestOutput] = Future()
        self._result.set_running_or_notify_cancel()  # who stops waiting does not cancel it for others

    @property
    def finished(self) -> bool:
        """Whether `result` returns or raises without waiting."""
        return self._result.done()

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the end, at most `timeout` seconds. Raises TimeoutError; the request then continues."""
        if not wait([self._result], timeout).done:
            raise TimeoutError(f"request {self.request_id} has not finished in {timeout} seconds")
        return self._result.result()

    def abort(self) -> None:
        """Cancel the request. Its result is the output so far, with finish_reason "cancelled"."""
        self._abort()

    def publish(self, output: RequestOutput) -> None:
        """Called by the generating thread with the output of a step or the finished one."""
        with self._lock:
            self._outputs.append(output)
            if output.finished:
                self._result.set_result(output)
            self._wake()

    def fail(self, error: BaseException) -> None:
        """Called by the generating thread: end with an error."""
        with self._lock:
            if not self.finished:
                self._result.set_exception(error)
            self._wake()

    def __await__(self) -> Generator[None, None, RequestOutput]:
        return asyncio.wrap_future(self._result).__await__()

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        while isinstance(found := self._next(), Future):
            await asyncio.wrap_future(found)
        if found is None:
            raise StopAsyncIteration
        return found

    def __iter__(self) -> Iterator[RequestOutput]:
        while (found := self._next()) is not None:
            if isinstance(found, Future):
                found.result()
            else:
                yield found

    def _next(self) -> RequestOutput | Future[None] | None:
        """The next output, or what is done once there is news. None: the end. Raises the request's error."""
        with self._lock:
            if self._outputs:
                return self._outputs.popleft()
            if not self.finished:
                self._waiters.append(Future())
                return self._waiters[-1]
        self._result.result()
        return None

    def _wake(self) -> None:
        for waiter in self._waiters:
            if waiter.set_running_or_notify_cancel():
                waiter.set_result(None)
        self._waiters.clear()


Output = TypeVar("Output")


@dataclass(frozen=True)
class PoolingOutput:
    """data: [n], or [tokens, n] for all tokens; float32."""

    data: np.ndarray


@dataclass(frozen=True)
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True)
class ClassificationOutput:
    """probs: one per label; logits with use_activation False."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(frozen=True)
class ScoringOutput:
    score: float


@dataclass(frozen=True)
class PoolingRequestOutput(Generic[Output]):
    """prompt_token_ids: after truncation; for two texts that are embedded, of both."""

    request_id: int
    outputs: Output
    prompt_token_ids: list[int]
    lora_request: LoRAChoice | None = None
    finished: bool = True
