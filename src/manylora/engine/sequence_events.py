"""Events: what is told of a sequence to whoever has sent its request."""

from __future__ import annotations

import numpy as np

from manylora.engine.sequence import Sequence
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
