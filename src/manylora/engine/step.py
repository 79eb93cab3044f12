"""LaunchedStep: a step whose forward pass was launched. ResultProcessor: applies its results to the sequences
that it ran. take_event: what the sender of a request is told.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from manylora.engine.kv_cache import KvCache
from manylora.engine.sampler import Row
from manylora.engine.scheduler import Chunk, Scheduler, Step
from manylora.engine.sequence import BeamGroup, Sequence
from manylora.errors import AdapterNotFiniteError, RequestError
from manylora.kernels.device import Arrival
from manylora.kernels.spec import NOT_FINITE
from manylora.request import ActivatedTokens, Beam, Event, FinishReason, RequestMetrics

SampledTokens = dict[Sequence, list[tuple[int, float | None]]]
"""(token, log probability) pairs of each sampled sequence: more than one if draft tokens were accepted.
NOT_FINITE replaces a token whose logits are not finite.
"""


@dataclass(frozen=True)
class BeamCandidate:
    """A beam extended by one token. parent: index of the beam; log_prob: of the token."""

    parent: int
    token: int
    log_prob: float
    score: float  # cumulative log probability


class LaunchedStep:
    """Created by the runner. tokens, log_probs: [D] on the device, one per entry of `rows`; see
    `sampler.sample`. A step without tokens must be waited for, too, because it reads adapters.

    pooled: float32 results of chunks of requests for pooled outputs, being copied to the host.
    candidates: of each beam search in the step; empty if the logits are not finite.
    assumed_done: set by the engine if the scheduler counted the step before its results are known.
    """

    def __init__(
        self,
        step: Step,
        rows: Rows[Row],
        tokens: Tensor,
        log_probs: Tensor | None,
        candidates: dict[BeamGroup, list[BeamCandidate]] | None = None,
        pooled: Rows[tuple[Chunk, Arrival]] = (),
    ) -> None:
        self.step, self.tokens = step, tokens
        self.candidates, self.pooled = candidates or {}, pooled
        self.assumed_done = False
        self._rows = rows
        self._tokens = Arrival(tokens)
        self._log_probs = Arrival(log_probs) if log_probs is not None else None

    @property
    def can_run_ahead(self) -> bool:
        """Whether the next step can be launched before the tokens of this one are known."""
        if self.step.run is not None:
            return self.step.run.can_run_ahead
        sampled = (chunk.sequence for chunk in self.step.chunks if chunk.samples)
        return all(sequence.can_run_ahead for sequence in sampled if not sequence.finished)

    @cached_property
    def index_of(self) -> dict[Sequence, int]:
        """Index into `tokens` of each sequence's next token."""
        return {sequence: index for index, (sequence, _) in enumerate(self._rows)}

    def wait(self) -> SampledTokens:
        """Wait until the tokens are on the host. Raises the device's errors."""
        sampled: SampledTokens = {}
        tokens = self._tokens.wait().tolist()
        log_probs = self._log_probs.wait().tolist() if self._log_probs else [None] * len(tokens)
        for (sequence, length), token, log_prob in zip(self._rows, tokens, log_probs, strict=True):
            found = token, log_prob if sequence.request.params.return_log_probs else None
            if not sequence.num_draft:
                sampled[sequence] = [found]
                continue
            accepted = sampled.setdefault(sequence, [])
            position = length - (len(sequence.tokens) - sequence.num_draft - sequence.is_pending)
            # A later token counts only if the draft tokens before it are those that the model has chosen.
            follows = 0 < position == len(accepted) and accepted[-1][0] == sequence.tokens[length - 1]
            if position == 0 or follows:
                accepted.append(found)
        return sampled


class FailedStep(LaunchedStep):
    """A step whose launch raised an error; `wait` raises it."""

    def __init__(self, step: Step, error: Exception) -> None:
        super().__init__(step, [], torch.empty(0, dtype=torch.long), None)
        self._error = error

    def wait(self) -> SampledTokens:
        raise self._error


def take_event(sequence: Sequence, last: bool) -> Event:
    """Everything since the sequence's last event. last: no other sequence of its request is open."""
    output, num_output = sequence.output, sequence.num_output
    start, output.num_reported = output.num_reported, num_output
    first, logits = sequence.num_prompt + start, output.generation_logits
    if logits and (sequence.finished or sequence.request.streaming):
        output.generation_logits = []
    elif logits:
        logits = []
    if sequence.finish_reason or output.metrics is None:  # events in between repeat those of the first
        output.metrics = _metrics(sequence)
    pooling, pooled = sequence.request.pooling, None
    if pooling is not None and sequence.finish_reason is FinishReason.STOP:
        pooled = np.concatenate(output.pooled) if pooling.mode == "all" else output.pooled[-1]
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
        pooled=pooled,
        metrics=output.metrics,
        versions=sequence.versions,
    )


def _metrics(sequence: Sequence) -> RequestMetrics:
    beams, times, kv, lease = sequence.output.beams, sequence.times, sequence.kv, sequence.lease
    activated = None
    if lease is not None and lease.invocation:
        count = sequence.num_prompt + sequence.num_output
        before = min(sequence.acts_from, count)
        activated = ActivatedTokens(before, min(kv.num_reused_tokens, before), count - before)
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
        cached_tokens=min(kv.num_reused_tokens, sequence.num_prompt),
        output_tokens=sum(len(beam.token_ids) for beam in beams) if beams else sequence.num_output,
        adapter_tier=lease.tier if lease is not None else "",
        adapter_read_ns=times.adapter_read_ns,
        adapter_ready_ns=times.adapter_ready_ns,
        activated=activated,
    )


Pairs = list[tuple[int, int]]


@dataclass(slots=True)
class StepOutcome:
    """What a step's results cause. Copies are (from, to) pairs for the runner, before the next step."""

    events: list[tuple[int, Event]] = field(default_factory=list)  # of streams, with their handles
    ended: list[Sequence] = field(default_factory=list)  # whose resources are still theirs
    block_copies: Pairs = field(default_factory=list)
    state_copies: Pairs = field(default_factory=list)


class ResultProcessor:
    """Appends tokens, moves beams and counts. It frees nothing: that is for the engine. counts: totals since
    the start, by the names of their fields in `EngineStats`.
    """

    def __init__(self, scheduler: Scheduler, kv: KvCache, counts: Counter[str], stream_interval: int) -> None:
        self._scheduler, self._kv, self._counts = scheduler, kv, counts
        self._stream_interval = stream_interval

    def apply(self, launched: LaunchedStep, sampled: SampledTokens) -> StepOutcome:
        step, outcome, now_ns = launched.step, StepOutcome(), time.monotonic_ns()
        self._counts["steps"] += 1
        self._counts["prompt_tokens"] += step.num_context_tokens
        for chunk in step.chunks:
            if chunk.sequence.is_pending:
                chunk.sequence.remove_pending_token()
        for sequence, tokens in sampled.items():
            if sequence.finish_reason is not None:  # cancelled meanwhile, or ended by the step before
                continue
            self._append(sequence, tokens, now_ns)
            if sequence.finish_reason is not None:
                outcome.ended.append(sequence)
            elif sequence.request.streaming and self._is_due(sequence):
                outcome.events.append((sequence.handle, take_event(sequence, last=False)))
        for chunk, arrival in launched.pooled:
            if chunk.sequence.finish_reason is None:  # otherwise cancelled meanwhile
                _add_pooled(chunk, arrival.wait().numpy())
                if chunk.sequence.finish_reason is not None:
                    chunk.sequence.times.mark_token(now_ns)
                    outcome.ended.append(chunk.sequence)
        if not launched.assumed_done:
            self._scheduler.advance(step)
        for group, candidates in launched.candidates.items():
            if not group.leader.finished:
                group.leader.times.mark_token(now_ns)
                self._advance_beams(group, candidates, outcome)
                if group.leader.finished:
                    outcome.ended.append(group.leader)
        return outcome

    def _is_due(self, sequence: Sequence) -> bool:
        """Whether a stream sends an event now: the first token, and tokens with logits, at once."""
        reported = sequence.output.num_reported
        at_once = not reported or sequence.request.params.return_generation_logits
        return sequence.num_output - reported >= (1 if at_once else self._stream_interval)

    def _append(self, sequence: Sequence, tokens: list[tuple[int, float | None]], now_ns: int) -> None:
        """Append the tokens of one step, up to the one that ends the sequence."""
        if sequence.num_draft:
            self._counts["drafts"] += 1
            self._counts["draft_tokens"] += sequence.num_draft
            self._counts["accepted_draft_tokens"] += len(tokens) - 1
            sequence.drop_draft(len(tokens) - 1)
        guide = sequence.guide
        for token, log_prob in tokens:
            if token != NOT_FINITE:
                self._counts["generated_tokens"] += 1
                sequence.times.mark_token(now_ns)
                sequence.append(token, log_prob)
            elif guide is not None and guide.failure:
                sequence.fail(RequestError(guide.failure))
            elif guide is None or not guide.is_late:  # if it was late, the step is repeated
                sequence.fail(_not_finite(sequence))
            if sequence.finish_reason is not None:
                break
        # Each row has logits: drop those after the last token.
        if sequence.output.generation_logits:
            del sequence.output.generation_logits[sequence.num_output - sequence.output.num_reported :]

    def _advance_beams(self, group: BeamGroup, candidates: list[BeamCandidate], outcome: StepOutcome) -> None:
        """Move the beams of one search to the candidates for their next tokens."""
        leader = group.leader
        if not candidates:
            leader.fail(_not_finite(leader))
            return
        self._counts["generated_tokens"] += group.width
        chosen = select_beams(group, candidates)
        if not chosen:
            return
        self._scheduler.fork(leader, extend_beams(group, chosen, self._kv))
        copies = [self._kv.make_writable(beam, group.reserve) for beam in group.beams]
        outcome.block_copies += [pair for pair in copies if pair is not None]
        if self._kv.states is not None:
            outcome.state_copies += self._kv.states.take_copies()


def _add_pooled(chunk: Chunk, values: np.ndarray) -> None:
    """Add the result of one chunk, and end the sequence with the last one."""
    sequence, output = chunk.sequence, chunk.sequence.output
    if not np.isfinite(values).all():
        sequence.fail(_not_finite(sequence))
        return
    if chunk.start == 0:  # also after a preemption
        output.pooled = []
    output.pooled.append(values)
    if chunk.ends:
        sequence.finish_reason = FinishReason.STOP


def _not_finite(sequence: Sequence) -> RequestError:
    """The error mentions the adapter if there is one, because its client can replace it."""
    kind: type[RequestError] = RequestError
    adapter = ""
    if sequence.lease is not None:
        kind, adapter = AdapterNotFiniteError, "its adapter does not suit this model, or "
    return kind(
        f"The model's logits are not finite numbers for this request: {adapter}"
        "the compute dtype overflowed; try a wider dtype"
    )


# Beam search: each step extends each of `width` beams by every token and keeps the best. One that reaches the
# end id or a stop word becomes a result. The search ends when no running beam can still be among the best.


def select_beams(group: BeamGroup, candidates: list[BeamCandidate]) -> list[BeamCandidate]:
    """The `width` of these, best first, that continue; none if the search ends. Others become results."""
    chosen: list[BeamCandidate] = []
    for rank, candidate in enumerate(candidates):
        if _ends(group, candidate):
            if rank < group.width:
                _add_result(group, candidate)
        elif len(chosen) < group.width:
            chosen.append(candidate)
    leader, params = group.leader, group.leader.request.params
    length = leader.num_output + 1
    if leader.num_prompt + length >= leader.max_len:
        for candidate in chosen:
            _add_result(group, candidate)
        chosen = []
    if chosen:
        best = chosen[0].score / length**params.length_penalty
        full = len(group.results) >= group.width
        if not full or not (params.early_stopping or group.results[-1][0] >= best):
            return chosen
    count = group.width if params.num_return_sequences == 1 else params.num_return_sequences
    leader.output.beams = tuple(beam for _, beam in group.results[:count])
    leader.finish_reason = FinishReason.STOP if chosen else FinishReason.LENGTH
    return []


def extend_beams(group: BeamGroup, chosen: list[BeamCandidate], kv: KvCache) -> list[Sequence]:
    """Append each token to a beam. Returns the new beams, of the first step. A parent's best candidate stays
    in its sequence; others take those of parents without a candidate, and share the parent's KV blocks.
    """
    best_of: dict[int, int] = {}  # parent -> index of its best candidate
    for i, candidate in enumerate(chosen):
        best_of.setdefault(candidate.parent, i)
    one = group.leader
    added = [
        Sequence(
            one.handle, one.request, one.index, one.max_len, one.lease, group, rope_length=one.rope_length
        )
        for _ in range(group.width - len(group.beams))
    ]
    spare = [beam for index, beam in enumerate(group.beams) if index not in best_of] + added
    beams: list[Sequence] = []
    for i, candidate in enumerate(chosen):
        source = group.beams[candidate.parent]
        target = source if best_of[candidate.parent] == i else spare.pop()
        if target is not source:
            target.tokens = list(source.tokens)
            target.counts = source.counts and source.counts.copy()
            target.output.log_probs = list(source.output.log_probs)
            kv.fork(source, target, group.reserve)
        beams.append(target)
    for beam, candidate in zip(beams, chosen, strict=True):
        beam.tokens.append(candidate.token)
        beam.output.log_probs.append(candidate.log_prob)
    group.beams, group.scores = beams, [candidate.score for candidate in chosen]
    group.forked = True
    return added


def _ends(group: BeamGroup, candidate: BeamCandidate) -> bool:
    params, parent = group.leader.request.params, group.beams[candidate.parent]
    if candidate.token == params.end_id:
        return True
    output = [*parent.tokens[parent.num_prompt :], candidate.token]
    return any(tuple(output[-len(word) :]) == word for word in params.stop_words)


def _add_result(group: BeamGroup, candidate: BeamCandidate) -> None:
    params, parent = group.leader.request.params, group.beams[candidate.parent]
    tokens, log_probs = parent.tokens[parent.num_prompt :], list(parent.output.log_probs)
    length = len(tokens) + 1
    if candidate.token != params.end_id:
        tokens = [*tokens, candidate.token]
        log_probs.append(candidate.log_prob)
    beam = Beam(tuple(tokens), tuple(log_probs), candidate.score)
    group.results.append((candidate.score / length**params.length_penalty, beam))
    group.results.sort(key=lambda pair: -pair[0])
    del group.results[group.width :]


def best_candidates(log_probs: Tensor, group: BeamGroup) -> list[BeamCandidate]:
    """The best 2 * width, best first, of log_probs [beams, vocab] float32. With a diversity rate g, a beam's
    n-th best token, counted from 0, is ranked as if its log probability were n * g lower.
    """
    vocab = log_probs.shape[-1]
    count = min(2 * group.width, vocab)
    best, tokens = torch.topk(log_probs, count, dim=-1)
    scores = best + torch.tensor(group.scores, dtype=best.dtype, device=best.device).unsqueeze(1)
    rate = group.leader.request.params.beam_search_diversity_rate
    ranked = scores - rate * torch.arange(count, device=best.device)
    order = torch.topk(ranked.flatten(), min(2 * group.width, ranked.numel())).indices.tolist()
    flat_scores, flat_tokens, flat_best = (x.flatten().tolist() for x in (scores, tokens, best))
    return [BeamCandidate(i // count, flat_tokens[i], flat_best[i], flat_scores[i]) for i in order]
