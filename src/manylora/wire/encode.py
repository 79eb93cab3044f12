"""Events to output tensors of `tensorrt_llm`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from manylora.request import Event, Request

__all__ = ["WINDOW", "Reply", "merge"]

WINDOW = 128
"""Ids before a chunk that its text may depend on. More only for a run of byte tokens longer than this."""


@dataclass
class Reply:
    """What is needed to answer one Request: which item of the batch it is, and what was sent so far."""

    request: Request
    batch_index: int | None  # None: the batch has one item
    exclude_input: bool
    _sent: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    _log_probs: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    def encode(self, event: Event) -> list[tuple[str, np.ndarray]]:
        """Tensors of one response, `output_ids` first. Leading dimension 1, beam dimension 1."""
        index, new = event.sequence_index, list(event.token_ids)
        streaming = self.request.streaming
        echo = [] if streaming or self.exclude_input else list(self.request.prompt)
        ids = echo + new
        tensors: list[tuple[str, np.ndarray]] = [
            ("output_ids", np.array([[ids]], np.int32).reshape(1, 1, len(ids))),
            ("sequence_length", np.array([[len(ids)]], np.int32)),
        ]
        if self.request.params.return_log_probs:
            so_far = self._log_probs[index]
            so_far += event.log_probs
            tensors.append(("cum_log_probs", np.array([[sum(so_far)]], np.float32)))
            tensors.append(("output_log_probs", np.array([[so_far]], np.float32).reshape(1, 1, len(so_far))))
        if self.batch_index is not None:
            tensors.append(("batch_index", np.array([[self.batch_index]], np.int32)))
        if self.request.params.num_return_sequences > 1:
            tensors.append(("sequence_index", np.array([[index]], np.int32)))
        if streaming:
            window = self._sent[index][-WINDOW:]
            self._sent[index] = window + new
            tensors.append(("previous_ids", np.array([[window]], np.int32).reshape(1, 1, len(window))))
        reason = event.finish_reason.value if event.finish_reason else ""
        tensors.append(("finish_reason", np.array([[reason.encode()]], np.object_)))
        return tensors


def merge(events: Sequence[Event]) -> Event:
    """Consecutive events of one sequence as one."""
    last = events[-1]
    return Event(
        token_ids=tuple(token for event in events for token in event.token_ids),
        log_probs=tuple(value for event in events for value in event.log_probs),
        sequence_index=last.sequence_index,
        finish_reason=last.finish_reason,
        last=last.last,
        error=last.error,
    )
