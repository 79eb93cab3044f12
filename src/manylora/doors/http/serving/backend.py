"""Backend: runs generations with their adapters on the engine, in turn, from the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from manylora.adapters.cache.leases import digest_of_mix
from manylora.adapters.catalog.catalog import AdapterCatalog
from manylora.adapters.catalog.entry import Version
from manylora.adapters.catalog.library import task_id_of
from manylora.adapters.catalog.pinning import EnginePins
from manylora.adapters.tensors import Adapter, FileAdapter
from manylora.doors.http.api import errors
from manylora.doors.http.api.errors import FORMAT, ApiError, as_api_error, invalid_value
from manylora.doors.http.serving.fair_queue import FairQueue
from manylora.doors.http.serving.metrics import History
from manylora.errors import (
    AdapterChangedError,
    AdapterNotCachedError,
    DrainingError,
    EngineDeadError,
    ManyloraError,
)
from manylora.generation.generation import Generation
from manylora.generation.outputs import PooledGeneration
from manylora.request import AdapterVersion, Event, LoraInput, LoraMix, Request, Sink, mix
from manylora.stats import CacheMap, EngineStats

if TYPE_CHECKING:
    from manylora.engine.loop import EngineLoop

logger = logging.getLogger("manylora")

MAP_TIMEOUT_S = 2.0  # the engine may be in a step with a long prompt
MAX_ATTEMPTS = 4  # the adapter may be evicted each time before the engine admits the request
Meter = Callable[[LoraInput | LoraMix | None, Event, float, float], None]
Wake = Callable[[], None]


class EngineClient(Protocol):
    """An engine, in this process or on Triton. Errors of a request go to its sink, from any thread."""

    def on_events(self, wake: Wake) -> None:
        """wake: called from any thread after the sinks, once for all events of a step."""

    @property
    def alive(self) -> bool: ...

    @property
    def pins(self) -> EnginePins | None: ...

    @property
    def loop(self) -> EngineLoop | None:
        """If it is in this process."""

    def submit(self, request: Request, sink: Sink) -> int: ...

    def cancel(self, ticket: int) -> None: ...

    def stats(self) -> EngineStats: ...

    def resident(self, task_id: int) -> bool:
        """Whether the adapter is in the cache, so that a request needs to send only its id."""
        ...

    follows: bool
    """Whether sequences can switch to newer versions of their adapters, which `publish` delivers."""

    def publish(self, lora: LoraInput) -> object:
        """Make this content, which is included, the version that its name means. Does not wait."""

    def reset_prefix_cache(self, digest: str | None) -> None:
        """Reuse no KV blocks from before, of this content or of all. Raises ApiError."""

    def cache_map(self) -> Future[CacheMap] | None:
        """None: the engine does not report pages. Raises ManyloraError, as its result may."""

    async def close(self) -> None: ...


@dataclass(frozen=True)
class AdapterChoice:
    """Which adapters a request asks for. field: that named them. name: None is the base model.

    source: "hf" or "nemo", if given. mix: several adapters, or one with a scale; `name` is then all joined by
    +. shared: aliases of several models, with those that were chosen for this request.
    """

    field: str = "model"
    name: str | None = None
    source: str | None = None
    mix: tuple[tuple[str, float], ...] = ()
    shared: tuple[tuple[str, str], ...] = ()

    @property
    def answers(self) -> str:
        """The model that was chosen for the request, if its name means several."""
        return self.shared[0][1] if self.shared and not self.mix else ""

    @property
    def adapters(self) -> tuple[tuple[str, float], ...]:
        """All adapters with their scales."""
        return self.mix or (() if self.name is None else ((self.name, 1.0),))

    @property
    def alone(self) -> str | None:
        """The only adapter that acts: its text settings apply. None: the base model's apply."""
        acting = {name for name, scale in self.adapters if scale}
        return acting.pop() if len(acting) == 1 else None


JobT = TypeVar("JobT", Generation, PooledGeneration)


@dataclass(eq=False)
class Call(Generic[JobT]):
    """One generation with its adapters. policy: load_lora_weights.

    changed: set after every change, cleared by who waits; the calls of one HTTP request share it.
    guide_field: where the guide came from, for errors. version: of the first adapter. content: digest of
    everything that acts; empty: the base model. follow: lora_version. priority: lower is earlier.
    """

    generation: JobT
    changed: asyncio.Event
    choice: AdapterChoice
    policy: str = "auto"
    follow: bool = False
    guide_field: str = FORMAT
    priority: int = 0
    version: Version | None = None
    content: str = ""
    lora: LoraInput | LoraMix | None = None
    ticket: int | None = None
    answered: asyncio.Future[None] | None = None  # set when the engine sends no more events
    arrived: float = field(default_factory=time.monotonic)
    admitted: float = 0.0  # when its turn came
    sent: float = 0.0  # when it was last submitted to the engine
    task: asyncio.Task[None] | None = None

    @property
    def error(self) -> ApiError | None:
        """Why it failed."""
        error = self.generation.error
        return None if error is None else errors.renamed(as_api_error(error), {FORMAT: self.guide_field})

    def take(self, event: Event) -> None:
        finished = self.generation.finished
        self.generation.take(event)
        if not finished:
            self.changed.set()

    def fail(self, error: Exception) -> None:
        self.generation.fail(error)
        self.changed.set()


class Backend:
    """Belongs to its event loop. meter: called for every ended sequence, with the seconds it waited here, and
    those of them for its adapter to be read. on_finished: called with each FinishedRequest. on_disconnect: if
    a client leaves during a stream.
    """

    def __init__(self, engine: EngineClient, catalog: AdapterCatalog, queue: FairQueue, meter: Meter) -> None:
        self.catalog, self.queue = catalog, queue
        self.engine, self._meter = engine, meter
        self.history = History()
        self.on_finished: list[Callable[[Any], None]] = []
        self.on_disconnect: Callable[[], None] = lambda: None
        # Requests that are sending the tensors of a task id right now.
        self._carrying: Counter[int] = Counter()
        self._events: deque[tuple[Call[Any], Event]] = deque()  # added by any thread
        self._loop, self._waking = asyncio.get_running_loop(), False
        engine.on_events(self._wake)
        self._open: set[Call[Any]] = set()
        catalog.on_change(self._publish)

    def _publish(self, version: Version, adapter: Adapter | FileAdapter, old: str) -> None:
        """Takes effect before any later request. An adapter that is not in use takes no space."""
        follows = any(call.follow and call.choice.name == version.name for call in self._open)
        if not (follows or self.engine.resident(task_id_of(old))):
            return
        lora = LoraInput(version.task_id, name=version.name, checked=adapter, version=version.number)
        with contextlib.suppress(EngineDeadError, DrainingError):
            self.engine.publish(lora)

    def submit(self, call: Call[Any]) -> None:
        """Start it. Errors are set on its generation."""
        self._open.add(call)
        call.task = asyncio.create_task(self._serve(call))

    def cancel(self, call: Call[Any]) -> None:
        """Cancel it. No effect if it has ended."""
        if call.ticket is not None and not call.generation.ended:
            self.engine.cancel(call.ticket)
        if call.task is not None:
            call.task.cancel()

    async def close(self) -> None:
        """Cancel all calls, and close the engine."""
        for call in list(self._open):
            call.fail(ApiError(503, "stopping", "The server is stopping", retry_after=5))
            self.cancel(call)
        await self.engine.close()

    def engine_stats(self) -> EngineStats:
        """The engine's statistics plus the requests that wait here. Cheap, without adapter names."""
        stats = self.engine.stats()
        return replace(stats, waiting=stats.waiting + self.queue.num_waiting)

    def stats(self) -> EngineStats:
        """The same with adapter names."""
        stats = self.engine_stats()
        residents = tuple(
            replace(one, name=name)
            for one in stats.adapters.residents
            for name in self.catalog.names_of(int(one.name))
        )
        waiting = [name for one in stats.waiting_adapters for name in self.catalog.names_of(int(one))]
        waiting += [key for key in self.queue.waiting_keys if key]
        return replace(
            stats,
            waiting_adapters=tuple(dict.fromkeys(waiting)),
            adapters=replace(stats.adapters, residents=residents),
        )

    async def cache_map(self) -> CacheMap | None:
        """Which adapter is on which pages, by name. None if the engine does not say, or not in time."""
        try:
            if (asked := self.engine.cache_map()) is None:
                return None
            found = await asyncio.wait_for(asyncio.wrap_future(asked), MAP_TIMEOUT_S)
        except (asyncio.TimeoutError, ManyloraError):
            return None
        names: dict[str, list[str]] = defaultdict(list)
        for entry in self.catalog.entries():
            if entry.version is not None:
                names[str(entry.version.task_id)].append(entry.name)

        def named(task_ids: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(name for task_id in task_ids for name in names.get(task_id, ()))

        return replace(
            found,
            adapters=tuple(replace(one, names=named(one.names)) for one in found.adapters),
            changes=tuple(replace(one, names=named(one.names)) for one in found.changes),
        )

    async def _serve(self, call: Call[Any]) -> None:
        generation = call.generation
        try:
            first = call.choice.adapters[0][0] if call.choice.adapters else ""
            tokens = len(generation.prompt)
            async with self.queue.turn(first, generation.num_sequences, tokens, call.priority):
                call.admitted = time.monotonic()
                await self._with_adapters(call)
        except asyncio.CancelledError:
            if call.ticket is not None and not generation.ended:
                self.engine.cancel(call.ticket)
            call.fail(ApiError(499, "cancelled", "The request was cancelled"))
            raise
        except Exception as error:
            known = as_api_error(error, call.choice.name or "")
            if known.code == "internal_error":
                logger.exception("request %s failed", generation.request_id)
            call.fail(known)
        finally:
            self._open.discard(call)

    async def _with_adapters(self, call: Call[Any]) -> None:
        if call.follow and not call.choice.adapters:
            reason = "lora_version follow needs an adapter, and the base model answers: use keep"
            raise invalid_value(reason, "lora_version")
        if call.follow and not self.engine.follows:
            reason = "lora_version follow needs the engine in this server, not behind triton_url: use keep"
            raise errors.unsupported_field(reason, "lora_version")
        versions: list[tuple[Version, float]] = []
        with contextlib.ExitStack() as stack:
            for name, scale in call.choice.adapters:
                if not scale:
                    continue
                version = await self.catalog.version(name, fresh=call.policy == "always")
                if call.choice.source and (call.choice.source == "nemo") != (version.facts.kind == "nemo"):
                    reason = f"adapter {name!r} is not a checkpoint of kind {call.choice.source}"
                    raise ApiError(422, "adapter_unsupported", reason, "lora_request.lora_ckpt_source")
                versions.append((version, scale))
                entry = self.catalog.enter(name)
                if entry is not None:
                    stack.callback(self.catalog.leave, entry)
            if versions:
                await self._try_to_send(call, versions)
            else:
                await self._through_engine(call, None)

    async def _try_to_send(self, call: Call[Any], versions: list[tuple[Version, float]]) -> None:
        """Send only ids of adapters that are in the cache or on the way to it. For others also tensors."""
        for attempt in range(MAX_ATTEMPTS):
            members: list[tuple[LoraInput, float]] = []
            for place, (version, scale) in enumerate(versions):
                here = self.engine.resident(version.task_id) or self._carrying[version.task_id] > 0
                if not here and call.policy == "never":
                    reason = "is not in the cache and load_lora_weights is never"
                    message = f"adapter {version.name!r} {reason}"
                    raise ApiError(409, "adapter_not_cached", message, "load_lora_weights")
                adapter = None
                if attempt > 0 or not here:
                    if call.follow:
                        version = await self.catalog.version(version.name)
                    version, adapter = await self.catalog.adapter(version)
                    versions[place] = version, scale
                lora = LoraInput(version.task_id, name=version.name, checked=adapter)
                members.append((replace(lora, version=version.number, follow=call.follow), scale))
            call.version = versions[0][0]
            call.content = _content(versions)
            try:
                await self._through_engine(call, mix(members))
                return
            except (AdapterNotCachedError, AdapterChangedError):
                continue  # evicted, or its files changed, meanwhile
        raise errors.adapter_cache_busy()

    async def _through_engine(self, call: Call[Any], lora: LoraInput | LoraMix | None) -> None:
        """Raises AdapterNotCachedError if the ids were not enough, and AdapterChangedError."""
        call.answered = asyncio.get_running_loop().create_future()
        call.lora, call.sent = lora, time.monotonic()
        self._carrying.update(_carried(lora))
        put = self._events.append
        call.ticket = self.engine.submit(call.generation.request(lora), lambda event: put((call, event)))
        await call.answered

    def _wake(self) -> None:
        """From any thread, once per engine step: it is a system call and competes for the GIL."""
        # No lock is needed: a caller that finds the flag set has added its events before `_take` clears the
        # flag, and `_take` counts the events after clearing it.
        if self._events and not self._waking and not self._loop.is_closed():
            self._waking = True
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        self._waking = False
        for _ in range(len(self._events)):
            call, event = self._events.popleft()
            try:
                self._take_one(call, event)
            except Exception as error:
                logger.exception("making the text of request %s failed", call.generation.request_id)
                call.fail(as_api_error(error))
                self.engine.cancel(call.ticket or 0)

    def _take_one(self, call: Call[Any], event: Event) -> None:
        generation, answered = call.generation, call.answered
        assert answered is not None
        lora = call.lora
        if lora is not None and lora.has_tensors:  # they are in the cache now, or were rejected
            for task_id in _carried(lora):
                self._carrying[task_id] -= 1
                if self._carrying[task_id] <= 0:
                    del self._carrying[task_id]
            call.lora = lora.without_tensors()  # free them
        again = (AdapterNotCachedError, AdapterChangedError)
        if isinstance(event.error, again) and call.policy != "never":
            if event.last and not answered.done():
                answered.set_exception(event.error)
            return
        if event.finish_reason is not None:
            waited_s = call.sent - call.arrived
            self._meter(call.lora, event, waited_s, call.sent - call.admitted)
            self.history.ended(event, waited_s)
            if event.metrics is not None:
                first = call.choice.adapters[0][0] if call.choice.adapters else ""
                self.queue.count_output(first, event.metrics.output_tokens)
        if event.error is not None:
            event = replace(event, error=as_api_error(event.error, call.choice.name or ""))
        alone = isinstance(call.lora, LoraInput)  # mixes are not counted
        if alone and call.version is not None and not event.versions:  # the engine does not count versions
            told = AdapterVersion(call.version.name, call.version.number, call.version.digest)
            event = replace(event, versions=(told,))
        call.take(event)
        if event.last:
            if not answered.done():
                answered.set_result(None)
        # Ended by a stop text, which the engine does not know.
        elif generation.complete and call.ticket is not None:
            self.engine.cancel(call.ticket)


def _carried(lora: LoraInput | LoraMix | None) -> list[int]:
    """Task ids of the adapters that have tensors."""
    members = lora.members if lora is not None else ()
    return [number for one, _ in members if one.has_tensors for number in one.task_ids]


def _content(versions: list[tuple[Version, float]]) -> str:
    """As in `Call`. If an adapter is named twice, its scales add up, as in `mix`."""
    scales: dict[str, float] = {}
    for version, scale in versions:
        scales[version.digest] = scales.get(version.digest, 0.0) + scale
    acting = [(digest, scale) for digest, scale in scales.items() if scale]
    return acting[0][0] if len(acting) == 1 and acting[0][1] == 1 else digest_of_mix(acting)
