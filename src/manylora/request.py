"""What crosses a door: a Request goes in, Events come out. Plain data, validated where it is made."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from manylora.errors import RequestError

__all__ = ["Event", "FinishReason", "LoraInput", "Request", "SamplingParams", "Sink"]

MAX_SEED = 2**64 - 1


class FinishReason(str, Enum):
    """Why a sequence ended."""

    STOP = "stop"  # end_id or a stop word
    LENGTH = "length"  # max_tokens, or the model's longest sequence
    CANCELLED = "cancelled"  # by the client
    ERROR = "error"


@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded. Token ids, counts in tokens. Raises RequestError when a value cannot work.

    Greedy unless asked otherwise: `top_k` in {None, 0, 1} with `top_p` in {None, 0}, or `top_k` 1, or
    `temperature` 0, takes the most probable token.
    """

    max_tokens: int = 32  # new tokens, at least 1
    end_id: int | None = None  # generation stops at this token; None: runs to max_tokens
    temperature: float = 1.0
    top_k: int | None = None  # 0 or None: no limit
    top_p: float | None = None  # 0 or None: not set
    seed: int | None = None  # None: 0, so that a repeated request repeats its answer
    repetition_penalty: float = (
        1.0  # > 1 lowers tokens seen in prompt or output (divides or multiplies the logit)
    )
    presence_penalty: float = 0.0  # subtracted once from tokens of the output
    frequency_penalty: float = 0.0  # subtracted per occurrence in the output
    min_tokens: int = 0  # end_id is not taken before this many new tokens
    stop_words: tuple[tuple[int, ...], ...] = ()  # stops after any of these; the word stays in the output
    bad_words: tuple[tuple[int, ...], ...] = ()  # never completed
    num_return_sequences: int = 1  # independent samples of one prompt
    return_log_probs: bool = False

    def __post_init__(self) -> None:
        _require(self.max_tokens > 0, "request_output_len (max_tokens)", "must be > 0", self.max_tokens)
        _require(
            _finite(self.temperature) and self.temperature >= 0,
            "temperature",
            "must be >= 0",
            self.temperature,
        )
        _require(self.top_k is None or self.top_k >= 0, "top_k", "must be >= 0", self.top_k)
        _require(self.top_p is None or 0 <= self.top_p <= 1, "top_p", "must be in (0, 1]", self.top_p)
        _require(
            self.seed is None or 0 <= self.seed <= MAX_SEED,
            "random_seed",
            "must be an unsigned 64-bit integer",
            self.seed,
        )
        _require(
            _finite(self.repetition_penalty) and self.repetition_penalty > 0,
            "repetition_penalty",
            "must be > 0",
            self.repetition_penalty,
        )
        _require(_finite(self.presence_penalty), "presence_penalty", "must be finite", self.presence_penalty)
        _require(
            _finite(self.frequency_penalty), "frequency_penalty", "must be finite", self.frequency_penalty
        )
        _require(self.min_tokens >= 0, "min_length", "must be >= 0", self.min_tokens)
        _require(
            self.num_return_sequences > 0, "num_return_sequences", "must be > 0", self.num_return_sequences
        )
        _require(all(self.stop_words), "stop_words", "must not hold an empty word", self.stop_words)
        _require(all(self.bad_words), "bad_words", "must not hold an empty word", self.bad_words)

    @property
    def greedy(self) -> bool:
        """True when the most probable token is always taken."""
        return self.temperature == 0 or self.top_k == 1 or (not self.top_k and not self.top_p)


@dataclass(frozen=True, eq=False)
class LoraInput:
    """The adapter part of a request, as it came.

    task_id: unsigned 64-bit identity the client uses for this adapter.
    weights: [1, rows, W], float32, float16, or 2-byte void ("V2", the bits of bfloat16); None when cached.
    config:  [1, rows, 3 or 4] int32, columns module id, layer, rank[, is_dora]; None when cached.
    Shapes and contents are checked by `manylora.lora.tensors`, not here.
    """

    task_id: int | None
    weights: np.ndarray | None = None
    config: np.ndarray | None = None

    @property
    def has_tensors(self) -> bool:
        """True when the request brought tensors (possibly only one of the two, which is an error later)."""
        return self.weights is not None or self.config is not None


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt to continue, under one adapter or none.

    request_id: the client's own, for logs and `stop`; may be empty or repeated, the engine never keys by it.
    prompt:     token ids, at least one.
    streaming:  True: an Event for every step with new tokens; False: one Event for each finished sequence.
    """

    prompt: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    lora: LoraInput | None = None
    streaming: bool = False
    request_id: str = ""


@dataclass(frozen=True)
class Event:
    """News of one sequence of a request.

    token_ids: new since the last event of this sequence (all of them when not streaming); the prompt never.
    log_probs: natural-log probabilities of `token_ids`, same length; empty unless asked for. Taken after
               penalties and, when sampling, temperature; before the top-k and top-p cuts.
    finish_reason: None while the sequence goes on.
    last: True on exactly one event, the final one of the request.
    error: set exactly when finish_reason is ERROR.
    """

    token_ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    sequence_index: int = 0
    finish_reason: FinishReason | None = None
    last: bool = False
    error: Exception | None = None


Sink = Callable[[Event], None]
"""Takes the events of one request, on the engine's thread; must not block and must not raise."""


def _finite(value: float) -> bool:
    return math.isfinite(value)


def _require(ok: bool, name: str, rule: str, value: object) -> None:
    if not ok:
        raise RequestError(f"{name} {rule}, got {value}")
