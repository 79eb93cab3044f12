"""Sequence: the state of one continuation of one request, kept as counters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from manylora.request import Event, FinishReason, Request

__all__ = ["Lease", "Sequence"]


class Lease(Protocol):
    """What the scheduler knows of an adapter that a sequence holds."""

    @property
    def digest(self) -> str: ...


@dataclass(eq=False)
class Sequence:
    """`tokens` is prompt + output; the first `num_computed` of them have their keys and values in the cache.

    handle:       of the request, as `Engine.submit` returned it.
    index:        which of the request's return sequences.
    max_len:      tokens at which it ends, prompt included.
    blocks:       KV blocks in order, owned by `KvCache`.
    nodes:        identities of the full blocks that are registered for reuse, owned by `KvCache`.
    num_reported: output tokens that events carried already.
    num_overtaken: sequences admitted before this one though they came later.
    """

    handle: int
    request: Request
    index: int
    max_len: int
    lease: Lease | None = None
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_reported: int = 0
    num_overtaken: int = 0
    finish_reason: FinishReason | None = None
    error: Exception | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_due(self) -> int:
        """Tokens not yet computed: one while decoding, more in prefill or after a preemption."""
        return len(self.tokens) - self.num_computed

    @property
    def in_prefill(self) -> bool:
        return self.num_due > 1 or self.num_output == 0

    @property
    def root(self) -> str:
        """Where prefix reuse starts: the same tokens have other keys and values under another adapter."""
        return self.lease.digest if self.lease else ""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def append(self, token: int, log_prob: float | None) -> None:
        """Take the next token and see whether it ends the sequence. The end id itself is not output."""
        params = self.request.params
        if token == params.end_id:
            self.finish_reason = FinishReason.STOP
            return
        self.tokens.append(token)
        if log_prob is not None:
            self.log_probs.append(log_prob)
        if any(self._ends_with(word) for word in params.stop_words):
            self.finish_reason = FinishReason.STOP
        elif len(self.tokens) >= self.max_len:
            self.finish_reason = FinishReason.LENGTH

    def take_event(self, last: bool) -> Event:
        """What happened since the last event."""
        start = self.num_reported
        self.num_reported = self.num_output
        return Event(
            token_ids=tuple(self.tokens[self.num_prompt + start :]),
            log_probs=tuple(self.log_probs[start:]),
            sequence_index=self.index,
            finish_reason=self.finish_reason,
            last=last,
            error=self.error,
        )

    def _ends_with(self, word: tuple[int, ...]) -> bool:
        return self.num_output >= len(word) and tuple(self.tokens[-len(word) :]) == word
