"""Engine: computes requests in steps. Synchronous and single-threaded; `loop.EngineLoop` has the thread."""

from __future__ import annotations

import gc
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from manylora.config.engine import EngineConfig
from manylora.engine.build import TAGS, EngineParts, Sleep, build_parts, end_ranks
from manylora.engine.follower import follow
from manylora.engine.kv_cache import KvCache, StatePool
from manylora.engine.requests import LogitsMemory, Prepared, SequenceMaker
from manylora.engine.scheduler import Scheduler, Step
from manylora.engine.sequence import Sequence
from manylora.engine.step import FailedStep, LaunchedStep, ResultProcessor, take_event
from manylora.engine.swaps import VersionSwaps
from manylora.errors import QueueFullError, RequestError
from manylora.ranks.rank_info import find_rank
from manylora.request import AdapterVersion, Event, FinishReason, LoraInput, Request, mix
from manylora.stats import EngineStats

if TYPE_CHECKING:
    from llguidance import LLMatcher

logger = logging.getLogger("manylora")

MOST_SAVED = 8  # KV blocks that an idle engine copies before it looks for requests
PAUSE_S = 0.002  # while the disk is too slow for these
CLOSE_S = 10.0  # for copying the last ones

Events = list[tuple[int, Event]]  # each with the handle of its request


def open_engine(config: EngineConfig) -> Engine:
    """The engine of this process. Raises ConfigError. A rank other than 0 that torchrun or mpirun started
    serves rank 0 instead, and then the process ends (SystemExit).
    """
    info = find_rank(config.world_size)
    if info.rank:
        follow(config, info)
        raise SystemExit(0)
    return Engine(config)


class Engine:
    """One model, its KV cache and its adapters. A request passes through these calls: `prepare`, `submit`,
    `step` until its last event, and `cancel` if its client leaves.

    Methods belong to one thread unless they say that they are thread-safe. If there are several ranks, this
    is rank 0, and it starts or meets the others. Raises ConfigError as `open_engine`.

    library: what task ids and names of adapters mean; thread-safe. adapter_modules: those that adapters may
    have, by id. max_seq_len: tokens of a prompt and its output together. max_queue_size: waiting requests; 0:
    no limit. has_encoder: a request has two prompts.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._parts = parts = build_parts(config, find_rank(config.world_size))
        self.model, self.base, self.adapters = parts.model, parts.base, parts.adapters
        self.library, self.adapter_modules = self.adapters.library, self.adapters.modules
        self.max_seq_len, self._runner = parts.memory.kv.max_seq_len, parts.runner
        self.config = config = parts.config
        self.max_queue_size, self.has_encoder = config.max_queue_size, self.model.encoder is not None
        if self.model.bidirectional:  # each token depends on all others: prompts are computed whole
            self.config = config = replace(config, enable_kv_cache_reuse=False, enable_chunked_context=False)
        shape = config.tokens_per_block, config.enable_kv_cache_reuse
        states = StatePool(parts.states.num_slots, *shape) if parts.states is not None else None
        least = config.secondary_offload_min_priority or 0
        self._kv = KvCache(parts.memory.kv.num_blocks, *shape, states, parts.store, least)
        self._scheduler = Scheduler(self._kv, self.adapters, config)
        self._maker = SequenceMaker(config, parts, self._scheduler.speculation)
        self._swaps = VersionSwaps(self.adapters, self._scheduler, self._kv)
        self._requests: dict[int, list[Sequence]] = {}  # handle -> its open sequences
        self._logits_memory, self._next_handle = LogitsMemory(self.model), 0
        self._counts: Counter[str] = Counter()  # by their names in `EngineStats`
        self._results = ResultProcessor(self._scheduler, self._kv, self._counts, config.stream_interval)
        self._last_step = Step(())
        self._processed: Step | None = None  # by the last call of `step`
        self._in_flight: LaunchedStep | None = None  # its results are not processed yet
        self._sleep: Sleep | None = None
        self._stats_asleep: EngineStats | None = None

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def resolve(self, request: Request) -> Request:
        """The request with names of adapters replaced by task ids. Thread-safe. Raises RequestError."""
        lora = request.lora
        if lora is None or all(one.name is None for one, _ in lora.members):
            return request
        resolve = self.library.resolve
        if isinstance(lora, LoraInput):
            return replace(request, lora=resolve(lora))
        return replace(request, lora=mix([(resolve(one), scale) for one, scale in lora.members]))

    def compile(self, request: Request) -> LLMatcher | None:
        """A matcher for the request's guide. Thread-safe; may take seconds. Raises RequestError."""
        return self._maker.compile(request)

    def prepare(self, request: Request, matcher: LLMatcher | None = None) -> Prepared:
        """Validate a request and read its adapter. Thread-safe. Raises RequestError."""
        return self._maker.prepare(request, matcher)

    def submit(self, prepared: Prepared) -> int:
        """Queue a request. `step` returns its events under the handle returned here. Raises RequestError."""
        request = prepared.request
        count = 1 if request.params.beam_width > 1 else request.params.num_return_sequences
        limit, waiting = self.config.max_queue_size, len(self._scheduler.waiting)
        # A new sequence waits only if the batch has no free slot for it.
        free_slots = max(0, self.config.max_batch_size - self._scheduler.num_slots)
        if limit and (waiting >= limit or waiting + count > limit + free_slots):
            raise QueueFullError(limit)
        handle = self._next_handle
        self._next_handle += 1
        sequences: list[Sequence] = []
        room = self.max_seq_len - len(request.prompt)
        self._logits_memory.reserve(handle, request, min(request.params.max_tokens, room))
        try:
            for index in range(count):
                sequences.append(self._maker.make(prepared, handle, index))
                self._swaps.begin(sequences[-1], next(iter(prepared.adapters), None), self.open_sequences())
        except BaseException:
            self._release(sequences)
            self._logits_memory.release(handle)
            raise
        self._requests[handle] = sequences
        self._scheduler.waiting.extend(sequences)
        return handle

    def publish(self, lora: LoraInput) -> AdapterVersion:
        """Make this content, with tensors, what its name means from now on. Raises AdapterError."""
        version = self._swaps.publish(lora, self.adapters.prepare(lora), self.open_sequences())
        self._swaps.drop_superseded(self.open_sequences())
        return version

    def cancel(self, handle: int) -> Events:
        """End a request now and free its resources. An unknown or ended handle gives no events."""
        sequences = list(self._requests.get(handle, ()))
        for sequence in sequences:
            sequence.finish_reason = FinishReason.CANCELLED
        self._counts["requests_cancelled"] += bool(sequences)
        return self._retire(sequences)

    def step(self) -> Events:
        """Run one step. Returns the events of the results that were processed.

        On a device that overlaps steps, the results of the previous step are processed while it computes this
        one, with the same tokens. A sequence that turns out to have ended in the previous step then ran once
        more for nothing. If the next step depends on the tokens of the previous one, these are processed
        before it is scheduled.
        """
        started, self._processed = time.perf_counter(), None
        accepted = self._counts["accepted_draft_tokens"]
        events: Events = []
        previous, self._in_flight = self._in_flight, None
        # Leases change only while no step uses them.
        if previous is not None and (self._swaps.is_due or not self._assume_done(previous)):
            events, previous = self._process(previous), None
        if self._swaps.is_due:
            self._swaps.apply()
        step = self._scheduler.schedule(previous.step if previous is not None else None)
        lost = self._find_lost_adapters(step)
        launched = None if lost else self._launch(step, previous)
        events += self._process(previous)
        if lost:
            events += self._fail_lost_adapters(lost)
        elif self._parts.overlap and not isinstance(launched, FailedStep):
            self._in_flight = launched
        else:
            events += self._process(launched)
        if self._processed is not None and not self._processed.num_context_tokens:
            rows = (chunk.count for chunk in self._processed.chunks)
            self._scheduler.speculation.record_step(
                rows, time.perf_counter() - started, self._counts["accepted_draft_tokens"] - accepted
            )
        return events

    @property
    def is_asleep(self) -> bool:
        return self._sleep is not None

    def sleep(self, level: int) -> None:
        """Free memory while there are no requests, as `Sleep`. Prefixes are forgotten, adapters stay. Raises
        RequestError if there are several ranks, or if it is half awake.
        """
        assert not self._requests
        if self._parts.leader is not None:
            raise RequestError("sleep needs an engine with one rank: stop the server instead")
        if self._sleep is not None and self._sleep.missing != set(TAGS):
            raise RequestError("wake the engine up wholly before it sleeps again")
        if self._sleep is not None and self._sleep.level >= level:
            return
        self._process(self._in_flight)
        self._in_flight, self._processed, self._last_step = None, None, Step(())
        self._kv.drop_all()
        stats, self._sleep = self.stats(), Sleep(self._parts, level)
        weights = stats.weight_bytes if level == 1 else 0
        self._stats_asleep = replace(stats, kv_bytes=0, weight_bytes=weights)
        self._take_parts(self._sleep.asleep)
        gc.collect()  # nobody holds the old parts any more
        self._parts.device.release_memory()

    def wake_up(self, tags: set[str]) -> None:
        """Get the memory of these TAGS back. Raises ConfigError."""
        if self._sleep is not None and (parts := self._sleep.wake(tags)) is not None:
            reloaded, self._sleep, self._stats_asleep = self._sleep.level == 2, None, None
            self._take_parts(parts, reloaded)

    def _take_parts(self, parts: EngineParts, reloaded: bool = False) -> None:
        if parts.store is not None:
            parts.store.use(parts.kv, reloaded=reloaded)
        self._parts, self._runner = parts, parts.runner
        self._maker = SequenceMaker(self.config, parts, self._scheduler.speculation)

    def close(self) -> None:
        """Drop all requests without events, and end the threads and the other ranks. Idempotent."""
        for sequence in self.open_sequences():
            if sequence.guide is not None:
                sequence.guide.close()
        self._in_flight = None
        self._requests.clear()
        if self._parts.store is not None:
            deadline = time.monotonic() + CLOSE_S
            with suppress(RuntimeError):  # the device may be lost
                while self.save_blocks(MOST_SAVED) and time.monotonic() < deadline:
                    pass
            self._parts.store.close()
        self.adapters.close()
        end_ranks(self._parts)

    def reset_prefix_cache(self, digest: str | None = None) -> None:
        """Reuse no KV blocks that are in the cache now. digest: only those of this adapter alone."""
        self._kv.reset(digest)

    def save_blocks(self, most: int) -> bool:
        """Copy KV blocks, at most so many, to host memory and disk. Returns whether there are more."""
        if self._parts.store is None:
            return False
        self._parts.device.activate()
        if not self._parts.store.is_ready:
            time.sleep(PAUSE_S)
        return self._kv.save_blocks(most)

    def wait_for_memory(self) -> None:
        """Wait while too much was read that is not cached yet. Thread-safe, but not on `step`'s thread."""
        self.adapters.loader.wait_for_memory()

    def end_waits(self) -> None:
        """Let nobody wait for memory any more. Thread-safe."""
        self.adapters.loader.end_waits()

    def on_loss(self, lost: Callable[[str], None]) -> None:
        """Call `lost` from any thread, with the reason, if the process of another rank ends or hangs."""
        if self._parts.leader is not None:
            self._parts.leader.on_loss(lost)

    def check(self) -> None:
        """Assert that blocks and pages add up: everything in use belongs to an open sequence."""
        self._kv.check(_with_beams(self.open_sequences()))
        self.adapters.check()

    def stats(self) -> EngineStats:
        if self._stats_asleep is not None:
            return replace(self._stats_asleep, adapters=self.adapters.stats())
        parts, scheduler, last_step = self._parts, self._scheduler, self._last_step
        chunks = last_step.chunks if scheduler.has_work else ()
        num_context = sum(chunk.in_context for chunk in chunks)
        leases = [sequence.lease for sequence in scheduler.waiting if sequence.lease is not None]
        waiting = [member.task_id for lease in leases for member, _ in lease.members]
        return EngineStats(
            waiting=len(scheduler.waiting),
            running=len(scheduler.running),
            max_batch_size=self.config.max_batch_size,
            on_gpu=parts.device.torch.type == "cuda",
            kv_blocks=self._kv.num_blocks,
            kv_blocks_free=self._kv.num_available,
            tokens_per_block=self._kv.tokens_per_block,
            kv_tokens_reused=scheduler.num_tokens_reused,
            kv_bytes=parts.memory.kv.num_bytes,
            weight_bytes=parts.decoder.weight_bytes,
            preemptions=scheduler.num_preemptions,
            scheduled=len(chunks),
            context_requests=num_context,
            generation_requests=len(chunks) - num_context,
            context_tokens=last_step.num_context_tokens if chunks else 0,
            max_adapters_in_step=parts.runner.inputs.max_adapters_in_step,
            waiting_adapters=tuple(dict.fromkeys(self.library.name_of(number) for number in waiting)),
            adapters=replace(self.adapters.stats(), sequence_swaps=self._swaps.num_swaps),
            graphs=parts.runner.graph_stats(),
            kv_store=None if parts.store is None else parts.store.stats(),
            **dict[str, Any](self._counts),
        )

    def open_sequences(self) -> list[Sequence]:
        """All sequences that have not ended."""
        return [sequence for sequences in self._requests.values() for sequence in sequences]

    def _assume_done(self, launched: LaunchedStep) -> bool:
        """Count a step as done before its tokens are known. False: the next step depends on them."""
        if not launched.can_run_ahead:
            return False
        for chunk in launched.step.chunks:
            if chunk.samples and chunk.sequence.finish_reason is None:
                chunk.sequence.append_pending_token()
        self._scheduler.advance(launched.step)
        launched.assumed_done = True
        return True

    def _launch(self, step: Step, previous: LaunchedStep | None = None) -> LaunchedStep | None:
        """None: nothing to compute. previous: still in flight; some rows take their tokens from it."""
        self._last_step = step
        if not step.chunks:
            return None
        try:
            return self._runner.launch(step, previous)
        except Exception as error:
            return FailedStep(step, error)

    def _process(self, launched: LaunchedStep | None) -> Events:
        """Wait for the results of a step and apply them. Raises DeviceLostError, GroupLostError."""
        if launched is None:
            return []
        try:
            sampled = launched.wait()
        except Exception as error:
            if self._parts.leader is not None:
                raise self._parts.leader.lost(error) from error
            logger.exception("a step of %d sequences failed", len(launched.step.chunks))
            self._parts.device.probe()
            text = f"Encountered an error in forwardAsync function: {type(error).__name__}"
            sequences = [chunk.sequence for chunk in launched.step.chunks]
            leaders = dict.fromkeys(one if one.beams is None else one.beams.leader for one in sequences)
            failed = [sequence for sequence in leaders if not sequence.finished]
            for sequence in failed:
                sequence.remove_pending_token()
                sequence.fail(RequestError(text))
            return self._retire(failed)
        self._processed = launched.step
        outcome = self._results.apply(launched, sampled)
        self._runner.copy(outcome.block_copies, outcome.state_copies)
        return outcome.events + self._retire(outcome.ended)

    def _find_lost_adapters(self, step: Step) -> Mapping[str, RequestError]:
        """Adapters of a step that could not be read, by digest. Waits for all others."""
        chunks = step.chunks if step.run is None else ()  # otherwise all of them have arrived
        sequences = [chunk.sequence for chunk in chunks if chunk.sequence.lease is not None]
        lost = self.adapters.find_lost(one.lease for one in sequences if one.lease is not None)
        for one in sequences:
            one.times.adapter_ready_ns = one.times.adapter_ready_ns or time.monotonic_ns()
        return lost

    def _fail_lost_adapters(self, lost: Mapping[str, RequestError]) -> Events:
        """End the requests whose adapters could not be read. The others are scheduled again."""
        affected = []
        for sequence in self.open_sequences():
            members = sequence.lease.members if sequence.lease is not None else ()
            found = next((lost[member.digest] for member, _ in members if member.digest in lost), None)
            if found is not None:
                sequence.fail(found)
                affected.append(sequence)
        events = self._retire(affected)
        self._swaps.forget_lost(lost)
        self.adapters.forget_lost()
        return events

    def _retire(self, ended: list[Sequence]) -> Events:
        """Free the resources of ended sequences. Returns the last event of each."""
        self._scheduler.remove(_with_beams(ended))
        for sequence in ended:
            if sequence.guide is not None:
                sequence.guide.close()
        self._release(ended)
        events = []
        for sequence in ended:
            others = self._requests[sequence.handle]
            others.remove(sequence)
            if not others:
                del self._requests[sequence.handle]
                self._logits_memory.release(sequence.handle)
                self._counts["requests_finished"] += 1
                self._counts["requests_failed"] += sequence.finish_reason is FinishReason.ERROR
            events.append((sequence.handle, take_event(sequence, last=not others)))
        self._swaps.drop_superseded(self.open_sequences())
        return events

    def _release(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self._swaps.forget(sequence)
            if sequence.lease is not None:
                self.adapters.release(sequence.lease)


def _with_beams(sequences: list[Sequence]) -> list[Sequence]:
    """The sequences, with the leader of each beam search replaced by all of its beams."""
    return [s for one in sequences for s in ([one] if one.beams is None else one.beams.beams)]
