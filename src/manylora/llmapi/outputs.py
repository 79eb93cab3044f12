"""What an LLM returns: RequestOutput, with a CompletionOutput for each output of a prompt; GenerationResult,
its future and stream; embeddings, labels and scores, with vLLM's names.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from manylora.config.pooling import PoolingSettings
from manylora.llmapi.lora import LoRAChoice
from manylora.request import RequestMetrics


@dataclass(frozen=True)
class Logprob:
    """Natural log of a token's probability, after penalties and temperature. rank 1: the most probable
    token.
    """

    logprob: float
    rank: int | None = None


@dataclass(frozen=True)
class LoraVersion:
    """Tokens [start, end) of an output and the adapter content that generated them. version: counts the
    contents of the name, from 1.
    """

    name: str
    version: int
    digest: str
    start: int
    end: int


@dataclass(frozen=True)
class CompletionOutput:
    """One output of a prompt so far.

    token_ids:     without the end token, and without a stop token unless include_stop_str_in_output.
    text_diff, token_ids_diff: new since the previous RequestOutput; everything if not streaming.
    cumulative_logprob: sum over token_ids; None unless log probabilities were computed. For a beam it
                   includes the end token.
    logprobs:      per token, a mapping from its id; None unless requested.
    finish_reason: None while running; then "stop", "length" or "cancelled".
    stop_reason:   the `stop` text or the `stop_token_ids` id that ended it, otherwise None.
    generation_logits: [length, vocabulary] float32, if finished and requested.
    lora_versions: versions of its adapter, covering all tokens; empty for the base model.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    text_diff: str = ""
    token_ids_diff: list[int] = field(default_factory=list)
    generation_logits: np.ndarray | None = field(default=None, compare=False)
    lora_versions: tuple[LoraVersion, ...] = ()

    @property
    def length(self) -> int:
        """In tokens."""
        return len(self.token_ids)


@dataclass(frozen=True)
class RequestTimings:
    """Seconds since the request was created, including the time to read its adapter. None: not reached yet.

    first_token: when it was published to the caller; without streaming, when the engine generated it.
    """

    first_token: float | None = None
    finished: float | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A prompt with its n outputs in their current state.

    prompt: None for a prompt of token ids. prompt_token_ids: after truncation.
    adapter_tier: where the adapter was found: "device", "host" or "disk"; empty without an adapter.
    metrics: the engine's times and counts for the sequence that ended last; None before the first ends.
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
    """Returned by `generate_async`. Usable from any thread and any event loop.

    `await result` and `result.result()` return the finished RequestOutput. `async for` and `for` yield a
    RequestOutput per step when streaming, otherwise only the finished one. Each output goes to one iterator.
    All of them raise the request's error, a RequestError or EngineDeadError.
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
            if output := self._take():
                return output
            if self.finished:
                self._raise_error()
                raise StopAsyncIteration
            await self._wait(lambda: not self._outputs and not self.finished)

    def __iter__(self) -> Iterator[RequestOutput]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._outputs or self.finished)
            output = self._take()
            if output is None:
                self._raise_error()
                return
            yield output

    def _take(self) -> RequestOutput | None:
        with self._changed:
            return self._outputs.popleft() if self._outputs else None

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
class PoolingParams:
    """dimensions: cut embeddings to this length. use_activation: normalise embeddings as the model's folder
    says, and convert logits to probabilities.
    """

    dimensions: int | None = None
    use_activation: bool = True
    truncate_prompt_tokens: int | None = None  # use only the last N tokens
    add_special_tokens: bool = True


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


def embedding(values: np.ndarray, settings: PoolingSettings, params: PoolingParams) -> np.ndarray:
    """values [..., hidden]. Raises ValueError for dimensions that the model does not support."""
    if params.dimensions is not None:
        check_dimensions(params.dimensions, settings)
        values = values[..., : params.dimensions]
    if not (settings.normalise and params.use_activation):
        return values
    return values / np.maximum(np.linalg.norm(values, axis=-1, keepdims=True), 1e-12)


def check_dimensions(dimensions: int, settings: PoolingSettings) -> None:
    known = settings.dimensions
    if known is None:
        raise ValueError(
            "dimensions: config.json names no matryoshka_dimensions (or is_matryoshka), so that this model's "
            "embeddings cannot be cut"
        )
    if dimensions not in known:
        listed = ", ".join(map(str, known)) if len(known) < 20 else f"from 1 to {known[-1]}"
        raise ValueError(f"dimensions must be one of {listed}, got {dimensions}")


def probabilities(logits: np.ndarray, settings: PoolingSettings, activate: bool = True) -> np.ndarray:
    """logits [..., labels] to probabilities, with softmax.

    With sigmoid for one label, and if problem_type in config.json is multi_label_classification. Unchanged if
    it is regression. problem_type applies only to heads with as many labels as the base model's.
    """
    count = logits.shape[-1]
    problem = settings.problem if len(settings.labels or (0, 0)) == count else ""
    if not activate or problem == "regression":
        return logits
    if count == 1 or problem == "multi_label_classification":
        return np.asarray(1 / (1 + np.exp(-logits.astype(np.float64))), np.float32)
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def similarity(a: np.ndarray, b: np.ndarray) -> float:
    """The cosine of two embeddings."""
    return float(a @ b / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-12))
