"""Event: new tokens of a sequence, or its end, with statistics."""

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
    LENGTH = "length"  # max_tokens, or the model's maximum length
    CANCELLED = "cancelled"  # by the client
    ERROR = "error"


@dataclass(frozen=True)
class ActivatedTokens:
    """Tokens of a request with an activated LoRA, in prompt and output together.

    before: where it does not act, so the base model does. shared: of these, tokens whose KV blocks were
    cached by any request.
    acted: the others, from its invocation on; 0 without an invocation.
    """

    before: int
    shared: int
    acted: int


@dataclass(frozen=True)
class RequestMetrics:
    """Times in nanoseconds of a monotonic clock, 0: not yet; numbers of KV blocks and of draft tokens.

    kv_reused_blocks: blocks of the prompt that were cached. kv_taken_blocks: the other blocks, without those
    of generated tokens. kv_new_blocks: those of them that did not evict a reusable block.
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
    adapter_tier: str = ""  # where the adapter was found: device, host, disk, wire; empty: no adapter
    activated: ActivatedTokens | None = None  # for an activated LoRA


@dataclass(frozen=True)
class Beam:
    """One result of a beam search. log_probs as in Event. cum_log_prob includes the end id."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    cum_log_prob: float


@dataclass(slots=True, eq=False)  # not frozen, which is slower to create: a stream has one per token
class Event:
    """New tokens of one sequence of a request, or its end.

    token_ids: new since the last event of this sequence (all of them if not streaming); never the prompt.
    log_probs: natural-log probabilities of `token_ids`, same length; empty unless requested. Computed after
             temperature and penalties, before the top-k and top-p cuts.
    finish_reason: None while the sequence continues.
    last: True on exactly one event, the final one of the request.
    error: set exactly if finish_reason is ERROR.
    beams: results of a beam search, best first; token_ids is empty then.
    context_logits: [prompt, vocab] float32, on the first event, if requested.
    generation_logits: [output, vocab] float32, on the last event of the sequence, if requested; when
    streaming
             [len(token_ids), vocab] on each event.
    pooled: float32, of a request with a pooling: [n], or [prompt, n] for all tokens.
    metrics: on the last event of each sequence. When streaming on every event, with the values of the first
    event
             until the last.
    versions: of the adapter, covering all of the sequence's tokens so far; empty for the base model.
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
"""Takes the events of one request, on the engine's thread. It must not block and must not raise."""
