"""ResultProcessor: applies the results of a step to the sequences that it ran. `take_event`: what the sender
of a request is told of them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from manylora.engine.beam import BeamCandidate, extend_beams, select_beams
from manylora.engine.kv_cache import KvCache
from manylora.engine.runner import Runner
from manylora.engine.scheduler import Scheduler
from manylora.engine.sequence import BeamGroup, Sequence
from manylora.engine.step_in_flight import LaunchedStep, SampledTokens
from manylora.errors import AdapterNotFiniteError, RequestError
from manylora.kernels.spec import NOT_FINITE
from manylora.request import ActivatedTokens, Event, FinishReason, RequestMetrics


def take_event(sequence: Sequence, last: bool) -> Event:
    """What has happened since the sequence's last event. last: no other sequence of its request goes on."""
    output, num_output = sequence.output, sequence.num_output
    start, output.num_reported = output.num_reported, num_output
    first, logits = sequence.num_prompt + start, output.generation_logits
    if logits and (sequence.finished or sequence.request.streaming):
        output.generation_logits = []
    elif logits:
        logits = []
    if sequence.finish_reason or output.metrics is None:
        output.metrics = _metrics(sequence)
    return Event(
        token_ids=() if output.beams else tuple(sequence.tokens[first : sequence.num_prompt + num_output]),
        log_probs=tuple(output.log_probs[start:]) if output.log_probs else (),
        sequence_index=sequence.index,
        finish_reason=sequence.finish_reason,
        last=last,
        error=sequence.error,
        beams=output.beams,
        context_logits=output.context_logits if start == 0 else None,
        generation_logits=np.stack(logits) if logits else None,
        pooled=_pooled(sequence),
        metrics=output.metrics,
        versions=sequence.following.versions,
    )


def _pooled(sequence: Sequence) -> np.ndarray | None:
    if sequence.request.pooling is None or sequence.finish_reason is not FinishReason.STOP:
        return None
    parts = sequence.output.pooled
    return np.concatenate(parts) if sequence.request.pooling.mode == "all" else parts[-1]


def _metrics(sequence: Sequence) -> RequestMetrics:
    """Made for the first event and for the last; the events between them repeat the first one's."""
    beams, times, kv = sequence.output.beams, sequence.times, sequence.kv
    return RequestMetrics(
        arrival_ns=times.arrival_ns,
        first_scheduled_ns=times.first_scheduled_ns,
        first_token_ns=times.first_token_ns,
        last_token_ns=times.last_token_ns if sequence.finished else 0,
        kv_new_blocks=kv.num_new,
        kv_taken_blocks=kv.num_claimed,
        kv_reused_blocks=kv.num_reused,
        draft_tokens=sequence.num_drafted,
        accepted_draft_tokens=sequence.num_accepted,
        prompt_tokens=sequence.num_encoder + sequence.num_prompt - sequence.num_virtual,
        output_tokens=sum(len(beam.token_ids) for beam in beams) if beams else sequence.num_output,
        adapter_tier=sequence.lease.tier if sequence.lease is not None else "",
        activated=_activated_tokens(sequence),
    )


def _activated_tokens(sequence: Sequence) -> ActivatedTokens | None:
    if sequence.lease is None or not sequence.lease.invocation:
        return None
    count = sequence.num_prompt + sequence.num_output
    before = min(sequence.acts_from, count)
    return ActivatedTokens(before, min(sequence.kv.num_reused_tokens, before), count - before)


@dataclass
class Counters:
    """Since the start; see the fields of the same names in `EngineStats`."""

    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    requests_finished: int = 0
    requests_failed: int = 0
    requests_cancelled: int = 0


class ResultProcessor:
    """Appends tokens, moves beams and counts. It frees nothing: that is for the engine.

    stream_interval: new tokens of a stream in one event.
    """

    def __init__(
        self, scheduler: Scheduler, kv: KvCache, runner: Runner, counters: Counters, stream_interval: int
    ) -> None:
        self._scheduler, self._kv, self._runner, self._counters = scheduler, kv, runner, counters
        self._stream_interval = stream_interval

    def apply(
        self, launched: LaunchedStep, sampled: SampledTokens
    ) -> tuple[list[tuple[int, Event]], list[Sequence]]:
        """Returns the events of streams, each with its request's handle, and the sequences that ended."""
        step = launched.step
        self._counters.steps += 1
        self._counters.prompt_tokens += step.num_context_tokens
        now_ns = time.monotonic_ns()
        for chunk in step.chunks:
            if chunk.sequence.is_pending:
                chunk.sequence.remove_pending_token()
        events: list[tuple[int, Event]] = []
        ended: list[Sequence] = []
        for sequence, tokens in sampled.items():
            if sequence.finish_reason is not None:  # cancelled meanwhile, or ended by the step before
                continue
            self._append(sequence, tokens, now_ns)
            if sequence.finish_reason is not None:
                ended.append(sequence)
            elif sequence.request.streaming and self._is_due(sequence):
                events.append((sequence.handle, take_event(sequence, last=False)))
        ended += self._take_pooled(launched, now_ns)
        if not launched.assumed_done:
            self._scheduler.advance(step)
        for group, candidates in launched.candidates.items():
            if not group.leader.finished:
                group.leader.times.mark_token(now_ns)
                self._advance_beams(group, candidates)
                if group.leader.finished:
                    ended.append(group.leader)
        return events, ended

    def _is_due(self, sequence: Sequence) -> bool:
        """Whether a stream has an event now: clients wait for the first token, and logits are not kept."""
        reported = sequence.output.num_reported
        at_once = not reported or sequence.request.params.return_generation_logits
        return sequence.num_output - reported >= (1 if at_once else self._stream_interval)

    @staticmethod
    def _take_pooled(launched: LaunchedStep, now_ns: int) -> list[Sequence]:
        """The sequences that ended."""
        ended = []
        for one in launched.pooled:
            sequence, values = one.chunk.sequence, one.values.wait().numpy()
            if sequence.finish_reason is not None:  # cancelled meanwhile
                continue
            if np.isfinite(values).all():
                sequence.add_pooled(one.chunk.start, values, one.chunk.ends)
            else:
                sequence.fail(_not_finite(sequence))
            if sequence.finished:
                sequence.times.mark_token(now_ns)
                ended.append(sequence)
        return ended

    def _append(self, sequence: Sequence, tokens: list[tuple[int, float | None]], now_ns: int) -> None:
        """Append the tokens of one step, up to the one that ends the sequence."""
        if sequence.num_draft:
            self._counters.drafts += 1
            self._counters.draft_tokens += sequence.num_draft
            self._counters.accepted_draft_tokens += len(tokens) - 1
            sequence.drop_draft(len(tokens) - 1)
        for token, log_prob in tokens:
            if token == NOT_FINITE:
                self._explain_missing_token(sequence)
            else:
                self._counters.generated_tokens += 1
                sequence.times.mark_token(now_ns)
                sequence.append(token, log_prob)
            if sequence.finish_reason is not None:
                break
        # There are logits of every row: drop those after the last token.
        if sequence.output.generation_logits:
            del sequence.output.generation_logits[sequence.num_output - sequence.output.num_reported :]

    @staticmethod
    def _explain_missing_token(sequence: Sequence) -> None:
        """End a sequence that got no token, unless its guide was only late: then it is run again."""
        guide = sequence.guide
        if guide is not None and guide.failure:
            sequence.fail(RequestError(guide.failure))
        elif guide is None or not guide.is_late:
            sequence.fail(_not_finite(sequence))

    def _advance_beams(self, group: BeamGroup, candidates: list[BeamCandidate]) -> None:
        """Move the beams of one search to the candidates for their next tokens."""
        leader = group.leader
        if not candidates:
            leader.fail(_not_finite(leader))
            return
        self._counters.generated_tokens += group.width
        chosen = select_beams(group, candidates)
        if not chosen:
            return
        self._scheduler.fork(leader, extend_beams(group, chosen, self._kv.fork))
        copies = [self._kv.make_writable(beam, group.reserve) for beam in group.beams]
        self._runner.copy_blocks([pair for pair in copies if pair is not None])
        if self._kv.states is not None:
            self._runner.copy_states(self._kv.states.take_copies())


def _not_finite(sequence: Sequence) -> RequestError:
    """The error names the adapter where there is one: its client can replace it, the base model it cannot."""
    text = (
        "The model's logits are not finite numbers for this request: {}"
        "the compute dtype overflowed; try a wider dtype"
    )
    if sequence.lease is None:
        return RequestError(text.format(""))
    return AdapterNotFiniteError(text.format("its adapter does not suit this model, or "))
