"""Sends requests to an `LLM` in this process, and records each answer and the engine's statistics."""

from __future__ import annotations

import asyncio
import importlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from manylora.bench.datasets import BenchRequest
from manylora.stats import EngineStats

if TYPE_CHECKING:
    from manylora.llmapi import LLM, RequestOutput

PERIOD_S = 0.02
Sample = tuple[float, EngineStats]
"""Seconds of `time.monotonic`, and the engine's statistics at that time."""


@dataclass(frozen=True)
class Answer:
    """A completed request. Times in seconds of `time.monotonic`.

    first_token: None if not known. adapter_tier: where the adapter was found: device, host, disk, or wire
    (its tensors came with the request); empty if not known.
    """

    first_token: float | None
    num_input_tokens: int
    num_output_tokens: int
    token_ids: tuple[int, ...] = ()
    text: str | None = None
    adapter_tier: str = ""


@dataclass(frozen=True)
class Record:
    """One request. started: when it was sent. error: None if it was answered."""

    request: BenchRequest
    started: float
    finished: float
    answer: Answer | None
    error: str | None = None


class Target(Protocol):
    """The system under load. `send` may raise any exception for a request that fails."""

    async def send(self, request: BenchRequest) -> Answer: ...


async def run_load(
    target: Target,
    requests: Sequence[BenchRequest],
    *,
    concurrency: int = 0,
    on_done: Callable[[Record], None] = lambda record: None,
) -> list[Record]:
    """Send all requests and wait for them. Returns records in the order of the requests.

    concurrency: requests running at one time; 0: no limit.
    """
    gate = asyncio.Semaphore(concurrency or max(1, len(requests)))

    async def one(request: BenchRequest) -> Record:
        async with gate:
            started = time.monotonic()
            try:
                answer = await target.send(request)
            except Exception as error:
                text = str(error) or type(error).__name__
                record = Record(request, started, time.monotonic(), None, text)
            else:
                record = Record(request, started, time.monotonic(), answer)
        on_done(record)
        return record

    return list(await asyncio.gather(*map(one, requests)))


class LocalTarget:
    """streaming: take each step's tokens as they arrive. sampling: fields of SamplingParams."""

    def __init__(self, llm: LLM, streaming: bool, sampling: dict[str, Any]) -> None:
        self._llm, self._streaming, self._sampling = llm, streaming, sampling

    async def send(self, request: BenchRequest) -> Answer:
        from manylora.llmapi import SamplingParams

        params = SamplingParams(**{**self._sampling, "max_tokens": request.output_tokens})
        prompt = request.prompt if request.input_ids is None else request.input_ids
        assert prompt is not None
        result = self._llm.generate_async(prompt, params, request.lora, self._streaming)
        first: float | None = None
        if self._streaming:
            async for piece in result:
                if first is None and piece.outputs[0].token_ids:
                    first = time.monotonic()
        return _answer(await result, first)


def _answer(output: RequestOutput, first: float | None) -> Answer:
    metrics, one = output.metrics, output.outputs[0]
    if first is None and metrics is not None and metrics.first_token_ns:
        first = metrics.first_token_ns * 1e-9
    return Answer(
        first_token=first,
        num_input_tokens=len(output.prompt_token_ids),
        num_output_tokens=len(one.token_ids),
        token_ids=tuple(one.token_ids),
        text=one.text or None,
        adapter_tier=output.adapter_tier,
    )


class Sampler:
    """A context manager that samples the engine's statistics every PERIOD_S seconds."""

    def __init__(self, llm: LLM) -> None:
        self.samples: list[Sample] = []
        self._llm = llm
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        going = True
        while going:
            going = not self._stop.wait(PERIOD_S)
            self.samples.append((time.monotonic(), self._llm.stats()))


@contextmanager
def progress(total: int) -> Iterator[Callable[[Record], None]]:
    """Yields a function that advances the progress bar. The bar is shown on a terminal if tqdm is
    installed.
    """
    try:
        tqdm = importlib.import_module("tqdm").tqdm
    except ImportError:
        yield lambda record: None
        return
    with tqdm(total=total, desc="Requests", dynamic_ncols=True, disable=None) as bar:
        yield lambda record: bar.update()
