"""One server in simulated time: the engine's scheduler, KV cache and adapter cache. Only computing and
loading are replaced with measured times.

`SimulatedStore` uses the real `AdapterCache` in the same way as `manylora.adapters.cache.store.AdapterStore`,
which cannot be used here because its pages need torch. As in `EngineLoop`, one thread reads adapters and one
thread writes them, concurrently with the steps.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from manylora.adapters.cache.cache import AdapterCache
from manylora.config.engine import EngineConfig
from manylora.doors.fleet.routing import Replica
from manylora.engine.kv_cache import KvCache
from manylora.engine.scheduler import Scheduler, Step
from manylora.engine.sequence import Sequence
from manylora.request import Request, SamplingConfig


@dataclass(frozen=True)
class Costs:
    """Durations in seconds.

    A step takes step_s, plus token_s per row of a prompt, row_s per decode row and adapter_s per distinct
    adapter. read_s: from an adapter's files to checked tensors. write_s: from there to the pages. It must not
    be 0 if writing takes any time, because a step that starts during a write leaves out the adapter's
    requests.
    """

    step_s: float
    token_s: float
    row_s: float
    adapter_s: float
    read_s: float
    write_s: float

    def of(self, step: Step) -> float:
        prompt = sum(chunk.num_rows for chunk in step.chunks if chunk.in_context)
        decode = sum(not chunk.in_context for chunk in step.chunks)
        adapters = {chunk.sequence.lease.digest for chunk in step.chunks if chunk.sequence.lease is not None}
        return self.step_s + prompt * self.token_s + decode * self.row_s + len(adapters) * self.adapter_s


@dataclass(frozen=True)
class Shape:
    """The size of a server: adapters that each level holds, requests in a step, tokens in the KV cache."""

    device_adapters: int
    host_adapters: int
    max_batch_size: int = 16
    max_num_tokens: int = 2048
    kv_tokens: int = 16384


@dataclass(eq=False, slots=True)
class Arrival:
    """A request and its result. at, first_token, end: in seconds, -1: not reached. prompt, output: tokens."""

    at: float
    adapter: str | None
    prompt: int
    output: int
    first_token: float = -1.0
    end: float = -1.0
    cold: bool = False  # whether its adapter was not on its server's host level


class Clock:
    """Simulated time. Runs events in the order of their times."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = count()

    def at(self, time: float, call: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), call, arguments))

    def run(self) -> None:
        while self._events:
            self.now, _, call, arguments = heapq.heappop(self._events)
            call(*arguments)


@dataclass(eq=False)
class Lease:
    """The part of `manylora.adapters.cache.leases.AdapterLease` that the scheduler uses."""

    digest: str
    carried: bool | None = None
    admitted: bool = False
    invocation: tuple[int, ...] = ()


class SimulatedStore:
    """Leases on the two levels of a real `AdapterCache`. Every adapter takes one page."""

    def __init__(self, shape: Shape, write_s: float, clock: Clock) -> None:
        self.cache = AdapterCache(shape.host_adapters, min(shape.device_adapters, shape.host_adapters))
        self.num_loads = 0  # to the host level
        self._write_s, self._clock, self._written = write_s, clock, 0.0
        self._ready: dict[str, float] = {}  # digest -> time at which it is written
        self._waiting: dict[str, set[Lease]] = {}

    def acquire(self, digest: str) -> Lease:
        lease = Lease(digest, None if self.cache.on_host(digest) else True)
        if self._bring_to_host(lease, force=False):
            self._waiting.setdefault(digest, set()).add(lease)
        return lease

    def admit(self, lease: Lease) -> bool:
        device = self.cache.device
        if not self.cache.on_device(lease.digest) and device.victims(1) is None:
            return False
        if not self._bring_to_host(lease, force=True):
            return False
        if not self.cache.on_device(lease.digest):
            self.cache.load(lease.digest, None)
        self._stop_waiting(lease)
        self.cache.host.pin(lease.digest)
        device.pin(lease.digest)
        lease.admitted = True
        return True

    def suspend(self, lease: Lease) -> None:
        if lease.admitted:
            self._unpin(lease)
            self._waiting.setdefault(lease.digest, set()).add(lease)

    def release(self, lease: Lease) -> None:
        if lease.admitted:
            self._unpin(lease)
        self._stop_waiting(lease)

    def is_loaded(self, lease: Lease) -> bool:
        return self.ready_at(lease) <= self._clock.now

    def ready_at(self, lease: Lease) -> float:
        return self._ready.get(lease.digest, 0.0)

    def _bring_to_host(self, lease: Lease, *, force: bool) -> bool:
        if not self.cache.on_host(lease.digest):
            victims = self.cache.host_victims(1, self._waiting, force=force)
            if victims is None:
                return False
            for victim in victims:
                for other in self._waiting.pop(victim, ()):
                    other.carried = True
                self.cache.evict(victim)
                self._ready.pop(victim, None)
            self.cache.host.put(lease.digest, 1, None)
            self.num_loads += 1
            self._written = max(self._written, self._clock.now) + self._write_s
            self._ready[lease.digest] = self._written
        lease.carried = None
        return True

    def _stop_waiting(self, lease: Lease) -> None:
        leases = self._waiting.get(lease.digest, set())
        leases.discard(lease)
        if not leases:
            self._waiting.pop(lease.digest, None)

    def _unpin(self, lease: Lease) -> None:
        self.cache.device.unpin(lease.digest)
        self.cache.host.unpin(lease.digest)
        lease.admitted = False


class SimulatedServer:
    """A server that reads adapters and runs steps in simulated time."""

    def __init__(self, name: str, costs: Costs, shape: Shape, clock: Clock) -> None:
        self.name, self.costs, self.shape, self.clock = name, costs, shape, clock
        self.store = SimulatedStore(shape, costs.write_s, clock)
        config = EngineConfig(
            Path(), max_batch_size=shape.max_batch_size, max_num_tokens=shape.max_num_tokens
        )
        blocks = shape.kv_tokens // config.tokens_per_block
        self.kv = KvCache(blocks, config.tokens_per_block, reuse=False)
        self.scheduler = Scheduler(self.kv, self.store, config)
        self.num_open = self.num_sent = 0
        self._of: dict[Sequence, Arrival] = {}
        self._inbox: deque[tuple[Arrival, bool]] = deque()  # with whether its adapter has been read
        self._to_read: deque[Arrival] = deque()
        self._preparing: Counter[str] = Counter()
        self._reading = self._stepping = False
        self._state: Replica | None = None

    @property
    def state(self) -> Replica:
        """The state that a router sees. Its sets are live views of the cache."""
        if self._state is None:
            running = min(self.num_open, self.shape.max_batch_size)
            self._state = Replica(
                self.name,
                self.shape.max_batch_size,
                running,
                self.num_open - running,
                self.store.cache.device.entries.keys(),
                self.store.cache.host.entries.keys(),
            )
        return self._state

    def arrive(self, arrival: Arrival) -> None:
        self._count(1)
        self.num_sent += 1
        self.clock.at(self.clock.now, self._take, arrival)  # after what happens at the same time

    def _take(self, arrival: Arrival) -> None:
        """Does the same as `EngineLoop.submit`."""
        if not self._enter_preparation(arrival):
            self._inbox.append((arrival, False))
            self._step()

    def _enter_preparation(self, arrival: Arrival) -> bool:
        """Queue a request for reading if its adapter is not on the host level, or is being read for an
        earlier request. Returns whether it was queued."""
        adapter = arrival.adapter
        if adapter is None or (self.store.cache.on_host(adapter) and not self._preparing[adapter]):
            return False
        arrival.cold = True
        self._preparing[adapter] += 1
        self._to_read.append(arrival)
        self._read()
        return True

    def _count(self, change: int) -> None:
        self.num_open += change
        self._state = None

    def _read(self) -> None:
        """The thread that reads adapters, one request at a time."""
        if self._to_read and not self._reading:
            self._reading = True
            arrival = self._to_read.popleft()
            there = self.store.cache.on_host(arrival.adapter or "")
            self.clock.at(self.clock.now + (0 if there else self.costs.read_s), self._was_read, arrival)

    def _was_read(self, arrival: Arrival) -> None:
        self._reading = False
        self._preparing[arrival.adapter or ""] -= 1
        self._inbox.append((arrival, True))
        self._step()
        self._read()

    def _step(self) -> None:
        """The engine thread: submit the arrived requests, then run one step if there is work."""
        if self._stepping:
            return
        while self._inbox:
            arrival, read = self._inbox.popleft()
            if read or not self._enter_preparation(arrival):  # an adapter may have been evicted meanwhile
                self._submit(arrival)
        if not self.scheduler.has_work:
            return
        step = self.scheduler.schedule()
        assert step.chunks, "there is work, but nothing can run"
        leases = (chunk.sequence.lease for chunk in step.chunks)
        ready = max((self.store.ready_at(lease) for lease in leases if lease is not None), default=0.0)
        self._stepping = True
        self.clock.at(max(self.clock.now, ready) + self.costs.of(step), self._stepped, step)

    def _submit(self, arrival: Arrival) -> None:
        lease: Any = self.store.acquire(arrival.adapter) if arrival.adapter is not None else None
        params = SamplingConfig(max_tokens=arrival.output)
        request = Request((5,) * arrival.prompt, params)
        sequence = Sequence(0, request, 0, arrival.prompt + arrival.output, lease)
        self._of[sequence] = arrival
        self.scheduler.waiting.append(sequence)

    def _stepped(self, step: Step) -> None:
        self._stepping = False
        ended = []
        for chunk in step.chunks:
            if not chunk.samples:
                continue
            sequence = chunk.sequence
            sequence.append(6, None)
            if sequence.num_output == 1:
                self._of[sequence].first_token = self.clock.now
            if sequence.finished:
                ended.append(sequence)
        self.scheduler.advance(step)
        self.scheduler.remove(ended)
        for sequence in ended:
            if sequence.lease is not None:
                self.store.release(sequence.lease)
            self._of.pop(sequence).end = self.clock.now
            self._count(-1)
        self._step()
