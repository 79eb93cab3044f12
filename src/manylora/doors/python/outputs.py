"""What an LLM returns: RequestOutput; GenerationResult, its future and stream; pooled outputs."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator
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


Waiter = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]"]


class GenerationResult:
    """Returned by `generate_async`. Usable from any thread and any event loop. Raises the request's error.

    `await result` and `result.result()` return the finished RequestOutput. `async for` and `for` yield a
    RequestOutput per step when streaming, otherwise only the finished one. Each output goes to one iterator.
    """

    def __init__(self, request_id: int, abort: Callable[[], None]) -> None:
        self.request_id = request_id
        self._abort = abort
        self._changed = threading.Condition()
        self._outputs: deque[RequestOutput] = deque()
        self._waiters: list[Waiter] = []
        self._output: RequestOutput | None = None
        self._error: BaseException | None = None

    @property
    def finished(self) -> bool:
        """Whether `result` returns or raises without waiting."""
        return self._output is not None or self._error is not None

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the end, at most `timeout` seconds. Raises TimeoutError; the request then continues."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.finished, timeout):
                raise TimeoutError(f"request {self.request_id} has not finished in {timeout} seconds")
        return self._finished_output()

    def abort(self) -> None:
        """Cancel the request. Its result is the output so far, with finish_reason "cancelled"."""
        self._abort()

    def publish(self, output: RequestOutput) -> None:
        """Called by the generating thread with the output of a step or the finished one."""
        with self._changed:
            self._outputs.append(output)
            if output.finished:
                self._output = output
            self._wake()

    def fail(self, error: BaseException) -> None:
        """Called by the generating thread: end with an error."""
        with self._changed:
            self._error = error
            self._wake()

    def __await__(self) -> Generator[None, None, RequestOutput]:
        while not self.finished:
            yield from self._wait(lambda: not self.finished).__await__()
        return self._finished_output()

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        while True:
            with self._changed:
                output, ended = self._outputs.popleft() if self._outputs else None, self.finished
            if output is not None:
                return output
            if ended:
                self._raise_error()
                raise StopAsyncIteration
            await self._wait(lambda: not self._outputs and not self.finished)

    def __iter__(self) -> Iterator[RequestOutput]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._outputs or self.finished)
                output = self._outputs.popleft() if self._outputs else None
            if output is None:
                self._raise_error()
                return
            yield output

    async def _wait(self, needed: Callable[[], bool]) -> None:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        with self._changed:
            if not needed():
                return
            self._waiters.append((loop, waiter))
        await waiter

    def _wake(self) -> None:
        self._changed.notify_all()
        for loop, waiter in self._waiters:
            with contextlib.suppress(RuntimeError):  # its event loop is closed
                loop.call_soon_threadsafe(_set, waiter)
        self._waiters.clear()

    def _finished_output(self) -> RequestOutput:
        self._raise_error()
        assert self._output is not None
        return self._output

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


def _set(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


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
