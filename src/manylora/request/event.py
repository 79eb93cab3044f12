"""Event: new tokens of a sequence, or its end, with what was counted meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np

from manylora.request.adapter import AdapterVersion


class FinishReason(str, Enum):
    """Why a sequence ended."""

    __str__ = str.__str__  # StrEnum, for Python 3.10

    STOP = "stop"  # end_id or a stop word
    LENGTH = "length"  # max_tokens, or the model's longest sequence
    CANCELLED = "cancelled"  # by the client
    ERROR = "error"


@dataclass(frozen=True)
class ActivatedTokens:
    """Tokens of a request with an activated LoRA, of prompt and output together.

    before: where it does not act, as in the base model. shared: of these, the ones whose KV blocks were
    there, made for whomever. acted: the others, from its invocation on; 0 without one.
    """

    before: int
    shared: int
    acted: int


@dataclass(frozen=True)
class RequestMetrics:
    """Times in nanoseconds of one monotonic clock, 0: not yet; counts of KV blocks and of draft tokens.

    kv_reused_blocks: of the prompt, those that were there. kv_taken_blocks: the others, generated tokens not
    counted; kv_new_blocks: those of them for which nothing known had to go.
    """

    arrival_ns: int
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    kv_new_blocks: int = 0
    kv_taken_blocks: int = 0
    kv_reused_blocks: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    adapter_tier: str = ""  # where the adapter was found: device, host, disk, wire; empty without one
    activated: ActivatedTokens | None = None  # of an activated LoRA


@dataclass(frozen=True)
class Beam:
    """One result of a beam search; log_probs as in Event. cum_log_prob counts the end id too."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    cum_log_prob: float


@dataclass(slots=True, eq=False)  # not frozen, which takes longer to make: a stream has one for each token
class Event:
    """New tokens of one sequence of a request, or its end.

    token_ids: new since the last event of this sequence (all of them when not streaming); the prompt never.
    log_probs: natural-log probabilities of `token_ids`, same length; empty unless asked for. Taken after
               temperature and penalties, before the top-k and top-p cuts.
    finish_reason: None while the sequence goes on.
    last: True on exactly one event, the final one of the request.
    error: set exactly when finish_reason is ERROR.
    beams: of a beam search, the best first; token_ids is empty then.
    context_logits: [prompt, vocab] float32, on the first event, when asked for.
    generation_logits: [output, vocab] float32, on the last event of the sequence, when asked for; of a stream
               [len(token_ids), vocab] on each of its events.
    pooled: float32, of a request with a pooling: [n], or [prompt, n] of all tokens.
    metrics: on the last event of each sequence, and on every event of a stream, where they are those of the
             first event until the last.
    versions: of the adapter, for all of the sequence's tokens so far; empty for the base model.
    """

    token_ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    sequence_index: int = 0
    finish_reason: FinishReason | None = None
    last: bool = False
    error: Exception | None = None
    beams: tuple[Beam, ...] = ()
    context_logits: np.ndarray | None = None
    generation_logits: np.ndarray | None = None
    pooled: np.ndarray | None = None
    metrics: RequestMetrics | None = None
    versions: tuple[AdapterVersion, ...] = ()


Sink = Callable[[Event], None]
"""Takes the events of one request, on the engine's thread; must not block and must not raise."""
