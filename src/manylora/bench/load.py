"""Sends requests to a target in a closed or an open loop, and records the result of each."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from manylora.bench.datasets import BenchRequest
from manylora.stats import EngineStats

Sample = tuple[float, EngineStats]
"""Seconds of `time.monotonic`, and the engine's statistics at that time."""


@dataclass(frozen=True)
class Answer:
    """A completed request. Times in seconds of `time.monotonic`.

    first_token: None if not known. token_ids: None from a server that returns only their number.
    adapter_tier: where the adapter was found: device, host, disk, or wire (its tensors came with the
    request); empty if not known.
    """

    first_token: float | None
    num_input_tokens: int
    num_output_tokens: int
    token_ids: tuple[int, ...] | None = None
    text: str | None = None
    adapter_tier: str = ""


@dataclass(frozen=True)
class Record:
    """One request. started: when it was sent; in an open loop when it was due, so that delays of the sender
    caused by a slow target count. error: None if it was answered.
    """

    request: BenchRequest
    started: float
    finished: float
    answer: Answer | None
    error: str | None = None


class Target(Protocol):
    """The system under load. `send` may raise any exception for a request that fails."""

    async def send(self, request: BenchRequest) -> Answer: ...


def poisson_arrivals(count: int, rate: float, rng: random.Random) -> list[float]:
    """Arrival times of a Poisson process, in seconds from the start; the first is 0. rate: per second."""
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + rng.expovariate(rate))
    return times[:count]


async def run_load(
    target: Target,
    requests: Sequence[BenchRequest],
    *,
    concurrency: int = 0,
    arrivals: Sequence[float] | None = None,
    on_done: Callable[[Record], None] = lambda record: None,
) -> list[Record]:
    """Send all requests and wait for them. Returns records in the order of the requests.

    concurrency: requests running at one time; 0: no limit. arrivals: when each request is due, in seconds
    from the start (open loop); None: as soon as concurrency allows (closed loop).
    """
    gate = asyncio.Semaphore(concurrency or max(1, len(requests)))
    begin = time.monotonic()

    async def one(number: int) -> Record:
        due = None
        if arrivals is not None:
            due = begin + arrivals[number]
            await asyncio.sleep(max(0.0, due - time.monotonic()))
        async with gate:
            record = await _send(target, requests[number], due)
        on_done(record)
        return record

    return list(await asyncio.gather(*(one(number) for number in range(len(requests)))))


async def _send(target: Target, request: BenchRequest, due: float | None) -> Record:
    started = time.monotonic() if due is None else due
    try:
        answer = await target.send(request)
    except Exception as error:
        return Record(request, started, time.monotonic(), None, str(error) or type(error).__name__)
    return Record(request, started, time.monotonic(), answer)
