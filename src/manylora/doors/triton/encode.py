"""ResponseEncoder: converts events to output tensors of `tensorrt_llm`."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from manylora.generation.stream import WINDOW
from manylora.request import Event, Request, RequestMetrics

_NOTHING = np.empty((1, 1, 0), np.int32)

Call = TypeVar("Call")
Item = tuple[Call, "ResponseEncoder | None", Event]
"""An event to be sent. Without an encoder the call ends, with the event's error if it has one."""


def adapter_told(name: str | None, task_id: int | None) -> bytes:
    """The text that tells postprocessing a request's adapter."""
    return f"id {task_id}".encode() if name is None else f"name {name}".encode()


@dataclass
class ResponseEncoder:
    """State for answering one Request. statistics: whether KV cache counts and times are requested."""

    request: Request
    batch_index: int | None  # None: the batch has one item
    exclude_input: bool
    statistics: bool = False
    logits_dtype: str = "float32"
    _sent: dict[int, np.ndarray] = field(default_factory=lambda: defaultdict(lambda: _NOTHING))
    _log_probs: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    _context_logits: np.ndarray | None = None
    _vocab_size: int = 0

    def encode(self, event: Event) -> list[tuple[str, np.ndarray]]:
        """Tensors of one response, `output_ids` first. Leading dimension 1.

        Text tensors are slow in every process on the way, so `finish_reason`, `lora_cache_tier` and
        `lora_versions` come only with the last response of a sequence.
        """
        streaming, params = self.request.streaming, self.request.params
        echo = [] if streaming or self.exclude_input else list(self.request.prompt)
        outputs = [beam.token_ids for beam in event.beams] or [event.token_ids]
        ids = [[*echo, *row] for row in outputs]
        tensors: list[tuple[str, np.ndarray]] = [
            ("output_ids", _table(ids, np.int32)),
            ("sequence_length", np.array([[len(row) for row in ids]], np.int32)),
        ]
        if params.return_log_probs:
            tensors += self._log_prob_tensors(event)
        if params.return_context_logits or params.return_generation_logits:
            tensors += self._logits_tensors(event)
        if event.pooled is not None:
            rows = event.pooled if event.pooled.ndim == 2 else event.pooled[np.newaxis]
            tensors.append(("pooled_output", rows[np.newaxis]))
        if self.batch_index is not None:
            tensors.append(("batch_index", np.array([[self.batch_index]], np.int32)))
        if params.num_return_sequences > 1 and not event.beams:
            tensors.append(("sequence_index", np.array([[event.sequence_index]], np.int32)))
        if self.statistics and event.metrics is not None:
            tensors += _statistics(event.metrics)
        if streaming:
            window = self._sent[event.sequence_index]
            tensors.append(("previous_ids", window))
            new = np.array([[event.token_ids]], np.int32)
            self._sent[event.sequence_index] = np.concatenate((window, new), axis=2)[:, :, -WINDOW:]
        if event.finish_reason is not None:
            tensors.append(("finish_reason", _text(event.finish_reason.value)))
            if event.metrics is not None and event.metrics.adapter_tier:
                tensors.append(("lora_cache_tier", _text(event.metrics.adapter_tier)))
            if event.versions:
                tensors.append(("lora_versions", _text(_versions(event))))
        return tensors

    def _log_prob_tensors(self, event: Event) -> list[tuple[str, np.ndarray]]:
        if event.beams:
            rows = [list(beam.log_probs) for beam in event.beams]
            sums = [beam.cum_log_prob for beam in event.beams]
        else:
            rows = [self._log_probs[event.sequence_index]]
            rows[0] += event.log_probs
            sums = [sum(rows[0])]
        return [
            ("cum_log_probs", np.array([sums], np.float32)),
            ("output_log_probs", _table(rows, np.float32)),
        ]

    def _logits_tensors(self, event: Event) -> list[tuple[str, np.ndarray]]:
        """If logits are requested, every response of a stream has both outputs: [1, prompt, vocab] for the
        whole prompt, and [1, 1, tokens, vocab] for the new tokens.
        """
        if event.context_logits is not None:
            self._context_logits = event.context_logits[np.newaxis].astype(self.logits_dtype)
        rows = event.generation_logits
        if rows is not None:
            self._vocab_size = rows.shape[-1]
        elif self._vocab_size and self.request.params.return_generation_logits:
            rows = np.empty((0, self._vocab_size))
        tensors = []
        if self._context_logits is not None:
            tensors.append(("context_logits", self._context_logits))
        if rows is not None:
            tensors.append(("generation_logits", rows[np.newaxis, np.newaxis].astype(self.logits_dtype)))
        return tensors


def _versions(event: Event) -> str:
    count = max((len(beam.token_ids) for beam in event.beams), default=0)
    if not event.beams:
        count = event.metrics.output_tokens if event.metrics is not None else len(event.token_ids)
    ends = [*(one.start for one in event.versions[1:]), count]
    return json.dumps(
        [
            {"name": one.name, "version": one.number, "digest": one.digest, "start": one.start, "end": end}
            for one, end in zip(event.versions, ends, strict=True)
        ]
    )


def merge_waiting(batch: Sequence[Item[Call]]) -> list[Item[Call]]:
    """Join neighbouring events of each streaming sequence. The order within each request is kept."""
    result: list[Item[Call]] = []
    latest: dict[int, tuple[int, Event]] = {}  # encoder -> index and content of its latest event
    for item in batch:
        call, encoder, event = item
        if encoder is None or not encoder.request.streaming:
            result.append(item)
            continue
        place, before = latest.get(id(encoder), (0, None))
        if before is not None and before.sequence_index == event.sequence_index:
            both = (before.generation_logits, event.generation_logits)
            logits = [rows for rows in both if rows is not None]
            event = replace(
                event,
                token_ids=before.token_ids + event.token_ids,
                log_probs=before.log_probs + event.log_probs,
                context_logits=before.context_logits,
                generation_logits=np.concatenate(logits) if logits else None,
            )
            result[place] = (call, encoder, event)
        else:
            place = len(result)
            result.append(item)
        latest[id(encoder)] = place, event
    return result


def _table(rows: Sequence[Sequence[float]], dtype: type) -> np.ndarray:
    """[1, rows, longest row]. Shorter rows are padded with -1."""
    if len(rows) == 1:
        return np.array([rows], dtype)
    table: np.ndarray = np.full((1, len(rows), max(map(len, rows))), -1, dtype)
    for i, row in enumerate(rows):
        table[0, i, : len(row)] = row
    return table


def _text(text: str) -> np.ndarray:
    return np.array([[text.encode()]], np.object_)


def _statistics(m: RequestMetrics) -> list[tuple[str, np.ndarray]]:
    rate = m.accepted_draft_tokens / m.draft_tokens if m.draft_tokens else 0.0
    values: list[tuple[str, float, type]] = [
        ("kv_cache_alloc_new_blocks", m.kv_new_blocks, np.int32),
        ("kv_cache_reused_blocks", m.kv_reused_blocks, np.int32),
        ("kv_cache_alloc_total_blocks", m.kv_taken_blocks, np.int32),
        ("arrival_time_ns", m.arrival_ns, np.int64),
        ("first_scheduled_time_ns", m.first_scheduled_ns, np.int64),
        ("first_token_time_ns", m.first_token_ns, np.int64),
        ("last_token_time_ns", m.last_token_ns, np.int64),
        ("acceptance_rate", rate, np.float32),
        ("total_accepted_draft_tokens", m.accepted_draft_tokens, np.int32),
        ("total_draft_tokens", m.draft_tokens, np.int32),
    ]
    return [(name, np.array([[value]], dtype)) for name, value, dtype in values]
