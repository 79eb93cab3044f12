"""Engine: submit, cancel, step, close. Synchronous, one thread; `loop.EngineLoop` gives it that thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from manylora.config.engine import EngineConfig
from manylora.engine.beam import BeamGroup, Choice
from manylora.engine.build import build_parts
from manylora.engine.checks import LogitsRoom, check_request
from manylora.engine.encoding import for_encoder
from manylora.engine.flight import Flight, Outcome
from manylora.engine.kv_cache import KvCache
from manylora.engine.sampler import NOT_FINITE
from manylora.engine.scheduler import Scheduler, Step
from manylora.engine.sequence import Sequence
from manylora.errors import AdapterNotCachedError, AdapterNotFiniteError, QueueFullError, RequestError
from manylora.lora.store import AdapterLease
from manylora.lora.stored import StoredAdapter
from manylora.lora.tensors import Adapter
from manylora.request import Event, FinishReason, LoraInput, Request
from manylora.stats import EngineStats

__all__ = ["Engine", "Prepared"]

logger = logging.getLogger("manylora")


@dataclass(frozen=True, eq=False)
class Prepared:
    """A request that was checked, with its adapter's tensors when they came along or were read from disk."""

    request: Request
    adapter: Adapter | StoredAdapter | None
    matcher: Any = None  # of guided decoding


@dataclass
class _Counters:
    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0


class Engine:
    """One model, its KV cache and its adapters. Every method but `prepare` belongs to one thread.

    Raises ConfigError when the configuration, the checkpoint or the memory cannot serve.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._parts = parts = build_parts(config)
        self.model, self.base, self.adapters = parts.model, parts.base, parts.adapters
        self.max_seq_len = parts.kv_plan.max_seq_len
        self._runner = parts.runner
        self._kv = KvCache(parts.kv_plan.num_blocks, config.tokens_per_block, config.enable_kv_cache_reuse)
        self._scheduler = Scheduler(
            self._kv,
            self.adapters,
            max_batch_size=config.max_batch_size,
            max_num_tokens=config.max_num_tokens,
            reserve_all=config.batch_scheduler_policy == "guaranteed_no_evict",
            chunked=config.enable_chunked_context,
        )
        self._requests: dict[int, list[Sequence]] = {}  # handle -> its sequences that have not ended
        self._logits_room = LogitsRoom(self.model.vocab_size)
        self._next_handle = 0
        self._count = _Counters()
        self._last_step = Step(())
        self._flight: Flight | None = None  # launched, its tokens not seen yet

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def max_queue_size(self) -> int:
        """Requests that may wait; 0: any number."""
        return self.config.max_queue_size

    def compile(self, request: Request) -> Any:
        """The matcher of a request's guide, None without one. Any thread; takes up to seconds. Raises
        RequestError, also for what else is wrong with the request."""
        self._check(request)
        return self._compile(request)

    def prepare(self, request: Request, matcher: Any = None) -> Prepared:
        """Check a request and read its adapter. matcher: what `compile` gave. Any thread. Raises
        RequestError."""
        request = self._check(request)
        adapter = self.adapters.prepare(request.lora) if request.lora else None
        return Prepared(request, adapter, self._compile(request) if matcher is None else matcher)

    def submit(self, prepared: Prepared) -> int:
        """Take a request; its events come out of `step` under the returned handle. Raises RequestError."""
        request = prepared.request
        count = 1 if request.params.beam_width > 1 else request.params.num_return_sequences
        self._check_queue(count)
        handle = self._next_handle
        self._next_handle += 1
        max_len = min(len(request.prompt) + request.params.max_tokens, self.max_seq_len)
        sequences: list[Sequence] = []
        self._logits_room.take(handle, request, max_len - len(request.prompt))
        try:
            for index in range(count):
                sequences.append(self._new_sequence(prepared, handle, index, max_len))
        except BaseException:
            self._release(sequences)
            self._logits_room.give_back(handle)
            raise
        self._requests[handle] = sequences
        for sequence in sequences:
            self._scheduler.add(sequence)
        return handle

    def cancel(self, handle: int) -> list[tuple[int, Event]]:
        """End a request now and free all it holds. An ended or unknown handle has no events."""
        sequences = list(self._requests.get(handle, ()))
        for sequence in sequences:
            sequence.finish_reason = FinishReason.CANCELLED
        self._count.cancelled += bool(sequences)
        return self._retire(sequences)

    def step(self) -> list[tuple[int, Event]]:
        """Schedule, launch, update. Returns the events of a step, each with its request's handle.

        Overlapped, the step is launched before the tokens of the one before are seen, and that one's events
        are returned; a sequence which those tokens end has run once more for nothing. Where they decide what
        comes next, and without overlap, the order is the plain one.
        """
        events: list[tuple[int, Event]] = []
        before, self._flight = self._flight, None
        if before is not None and not self._foresee(before):
            events, before = self._land(before), None
        step = self._scheduler.schedule(before.step if before is not None else None)
        lost = self.adapters.find_lost(_leases(chunk.sequence for chunk in step.chunks))
        if lost:
            events += self._land(before, foreseen=True) if before is not None else []
            return events + self._fail_lost(lost)
        self._last_step = step
        flight, failure = self._launch(step, before)
        if before is not None:
            events += self._land(before, foreseen=True)
        if failure is not None:
            events += self._fail(step, failure)
        elif flight is not None and not self._parts.overlap:
            events += self._land(flight)
        else:
            self._flight = flight
        return events

    def close(self) -> None:
        """Let go of every request without a word; for the end of the process and of tests."""
        self._flight = None
        self._let_go(self._everyone())
        self._requests.clear()

    def check(self) -> None:
        """Assert that pages add up: what is not free belongs to a live sequence."""
        self._kv.check(_with_beams(self._everyone()))
        self.adapters.check()

    def stats(self) -> EngineStats:
        count = self._count
        last = self._last_step if self._scheduler.has_work else Step(())
        num_context = sum(chunk.in_context for chunk in last.chunks)
        return EngineStats(
            waiting=len(self._scheduler.waiting),
            running=len(self._scheduler.running),
            max_batch_size=self.config.max_batch_size,
            on_gpu=self._parts.device.torch.type == "cuda",
            steps=count.steps,
            kv_blocks=self._kv.num_blocks,
            kv_blocks_free=self._kv.num_available,
            tokens_per_block=self._kv.tokens_per_block,
            kv_tokens_reused=self._scheduler.num_tokens_reused,
            kv_bytes=self._parts.kv_plan.num_bytes,
            weight_bytes=self._parts.decoder.weight_bytes,
            preemptions=self._scheduler.num_preemptions,
            prompt_tokens=count.prompt_tokens,
            generated_tokens=count.generated_tokens,
            requests_finished=count.finished,
            requests_failed=count.failed,
            requests_cancelled=count.cancelled,
            scheduled=len(last.chunks),
            context_requests=num_context,
            generation_requests=len(last.chunks) - num_context,
            context_tokens=last.num_context_tokens,
            max_adapters_in_step=self._runner.max_adapters_in_step,
            waiting_adapters=tuple({self.adapters.name_of(i): None for i in self._waiting_ids()}),
            adapters=self.adapters.stats(),
        )

    def _check_queue(self, count: int) -> None:
        """Raises QueueFullError. Of a request's sequences those wait that the batch has no place for now."""
        limit, waiting = self.config.max_queue_size, len(self._scheduler.waiting)
        places = max(0, self.config.max_batch_size - self._scheduler.num_slots)
        if limit and (waiting >= limit or waiting + count > limit + places):
            raise QueueFullError(limit)

    def _waiting_ids(self) -> list[int]:
        return [lease.task_id for lease in _leases(self._scheduler.waiting)]

    def _check(self, request: Request) -> Request:
        request = for_encoder(request, self.model.encoder)
        if self.config.wrap_input_ids and request.prompt_table is None:
            vocab = self.model.vocab_size
            prompts = (request.prompt, request.encoder_prompt)
            prompt, encoder_prompt = (tuple(token % vocab for token in ids) for ids in prompts)
            request = replace(request, prompt=prompt, encoder_prompt=encoder_prompt)
        check_request(request, self.config, self.model, self.max_seq_len)
        return request

    def _compile(self, request: Request) -> Any:
        guide = request.params.guide
        if guide is None:
            return None
        if self._parts.guides is None:
            raise RequestError(
                "guided decoding is not enabled on this server: set guided_decoding_backend and tokenizer_dir"
            )
        return self._parts.guides.compile(guide)

    def _everyone(self) -> list[Sequence]:
        """All that have not ended."""
        return [sequence for group in self._requests.values() for sequence in group]

    def _acquire(self, prepared: Prepared) -> tuple[AdapterLease | None, str]:
        """A lease on the request's adapter, and where that was found."""
        lora = prepared.request.lora
        if lora is None:
            return None, ""
        try:
            lease = self.adapters.acquire(lora, prepared.adapter)
        except AdapterNotCachedError:
            # Evicted since it was prepared: read it from its source once more, or give up for good.
            lease = self.adapters.acquire(lora, self.adapters.prepare(lora))
        return lease, lease.tier

    def _new_sequence(self, prepared: Prepared, handle: int, index: int, max_len: int) -> Sequence:
        lease, tier = self._acquire(prepared)
        sequence = Sequence(handle, _without_tensors(prepared.request), index, max_len, lease, tier=tier)
        if prepared.matcher is not None and self._parts.guides is not None:
            sequence.guide = self._parts.guides.begin(prepared.matcher)
        if prepared.request.params.beam_width > 1:
            sequence.beams = BeamGroup(prepared.request.params.beam_width, sequence)
        return sequence

    def _foresee(self, flight: Flight) -> bool:
        """Count a step as done that is still under way, its tokens as pending; False: they must be seen."""
        if not flight.is_foreseeable:
            return False
        for chunk in flight.step.chunks:
            if chunk.samples and not chunk.sequence.finished:
                chunk.sequence.foresee()
        self._scheduler.advance(flight.step)
        return True

    def _launch(self, step: Step, before: Flight | None) -> tuple[Flight | None, Exception | None]:
        if not step.chunks:
            return None, None
        try:
            return self._runner.launch(step, before), None
        except Exception as error:
            logger.exception("a step of %d sequences failed", len(step.chunks))
            return None, error

    def _land(self, flight: Flight, *, foreseen: bool = False) -> list[tuple[int, Event]]:
        """Wait for a step, and tell what it decided."""
        try:
            outcome = flight.land()
        except Exception as error:
            logger.exception("a step of %d sequences failed", len(flight.step.chunks))
            return self._fail(flight.step, error)
        for chunk in flight.step.chunks:
            chunk.sequence.recall()
        return self._update(flight.step, outcome, foreseen=foreseen)

    def _update(self, step: Step, outcome: Outcome, *, foreseen: bool) -> list[tuple[int, Event]]:
        self._count.steps += 1
        self._count.prompt_tokens += step.num_context_tokens
        events: list[tuple[int, Event]] = []
        ended: list[Sequence] = []
        for chunk, tokens in outcome.tokens.items():
            sequence = chunk.sequence
            if sequence.finished:  # while this step ran: it was cancelled, or the step before had its end
                continue
            sequence.drop_draft(len(tokens) - 1)
            for token, log_prob in tokens:
                if token == NOT_FINITE:
                    self._judge_broken(sequence)
                else:
                    self._count.generated_tokens += 1
                    sequence.append(token, log_prob)
                if sequence.finished:
                    break
            del sequence.generation_logits[sequence.num_output - sequence.num_reported :]
            if sequence.finished:
                ended.append(sequence)
            elif sequence.request.streaming and sequence.num_output > sequence.num_reported:
                events.append((sequence.handle, sequence.take_event(last=False)))
        if not foreseen:
            self._scheduler.advance(step)
        for group, choices in outcome.choices.items():
            if group.leader.finished:
                continue
            self._advance_beams(group, choices)
            if group.leader.finished:
                ended.append(group.leader)
        return events + self._retire(ended)

    @staticmethod
    def _judge_broken(sequence: Sequence) -> None:
        """A row without a token: its guide was not ready, and it comes again, or it cannot go on."""
        guide = sequence.guide
        if guide is not None and guide.failure:
            _set_error(sequence, RequestError(guide.failure))
        elif guide is None or not guide.is_late:
            _set_error(sequence, _not_finite(sequence))

    def _advance_beams(self, group: BeamGroup, choices: list[Choice]) -> None:
        """Move the beams of one search to the tokens chosen for them."""
        leader = group.leader
        leader.last_token_ns = time.monotonic_ns()
        leader.first_token_ns = leader.first_token_ns or leader.last_token_ns
        if not choices:
            _set_error(leader, _not_finite(leader))
            return
        self._count.generated_tokens += group.width
        going = group.settle(choices)
        if not going:
            return
        self._scheduler.fork(leader, group.move(going, self._kv.fork))
        copies = [self._kv.make_writable(beam, group.reserve) for beam in group.beams]
        self._runner.copy_blocks([pair for pair in copies if pair is not None])

    def _fail(self, step: Step, error: Exception) -> list[tuple[int, Event]]:
        leaders = {id(s): s for s in (_leader(chunk.sequence) for chunk in step.chunks) if not s.finished}
        text = f"Encountered an error in forwardAsync function: {type(error).__name__}"
        for sequence in leaders.values():
            sequence.recall()
            _set_error(sequence, RequestError(text))
        return self._retire(list(leaders.values()))

    def _fail_lost(self, lost: Mapping[str, RequestError]) -> list[tuple[int, Event]]:
        """End the requests whose adapters could not be read; the others are scheduled again."""
        affected = []
        for sequence in self._everyone():
            if isinstance(sequence.lease, AdapterLease) and sequence.lease.digest in lost:
                _set_error(sequence, lost[sequence.lease.digest])
                affected.append(sequence)
        events = self._retire(affected)
        self.adapters.forget_lost()
        return events

    def _retire(self, sequences: list[Sequence]) -> list[tuple[int, Event]]:
        """Free what ended sequences hold, and tell."""
        self._let_go(sequences)
        events = []
        for sequence in sequences:
            group = self._requests[sequence.handle]
            group.remove(sequence)
            if not group:
                del self._requests[sequence.handle]
                self._logits_room.give_back(sequence.handle)
                self._count.finished += 1
                self._count.failed += sequence.finish_reason is FinishReason.ERROR
            events.append((sequence.handle, sequence.take_event(last=not group)))
        return events

    def _let_go(self, sequences: list[Sequence]) -> None:
        self._scheduler.remove(_with_beams(sequences))
        for sequence in sequences:
            if sequence.beams is not None:
                self._kv.free_reserve(sequence.beams.reserve)
            if sequence.guide is not None:
                sequence.guide.close()
        self._release(sequences)

    def _release(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if isinstance(sequence.lease, AdapterLease):
                self.adapters.release(sequence.lease)


def _without_tensors(request: Request) -> Request:
    """The lease has the adapter now; its tensors need not stay in memory until the request ends."""
    lora = request.lora
    if lora is None or not lora.has_tensors:
        return request
    return replace(request, lora=LoraInput(lora.task_id, name=lora.name, source=lora.source))


def _leases(sequences: Iterable[Sequence]) -> list[AdapterLease]:
    return [sequence.lease for sequence in sequences if isinstance(sequence.lease, AdapterLease)]


def _leader(sequence: Sequence) -> Sequence:
    return sequence if sequence.beams is None else sequence.beams.leader


def _with_beams(sequences: list[Sequence]) -> list[Sequence]:
    """The sequences, and after each one that stands for a beam search its other beams."""
    return [s for one in sequences for s in ([one] if one.beams is None else one.beams.beams)]


def _not_finite(sequence: Sequence) -> RequestError:
    """An adapter is its client's own affair; the base model is the server's."""
    text = (
        "The model's logits are not finite numbers for this request: {}"
        "the compute dtype overflowed; try a wider dtype"
    )
    if sequence.lease is None:
        return RequestError(text.format(""))
    return AdapterNotFiniteError(text.format("its adapter does not suit this model, or "))


def _set_error(sequence: Sequence, error: Exception) -> None:
    sequence.finish_reason, sequence.error = FinishReason.ERROR, error
