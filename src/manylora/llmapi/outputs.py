"""What generation gives back: RequestOutput, with one CompletionOutput for each continuation."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from manylora.llmapi.lora import LoRARequest
from manylora.request import RequestMetrics

__all__ = ["CompletionOutput", "Logprob", "RequestOutput", "RequestTimings"]


@dataclass(frozen=True)
class Logprob:
    """Natural logarithm of a token's probability, after penalties and temperature; rank 1: most probable."""

    logprob: float
    rank: int | None = None


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation of a prompt, so far.

    token_ids:     of the output, without the end token; with stop token only where it was asked for.
    text_diff, token_ids_diff: new since the RequestOutput before this one; all of it when not streaming.
    cumulative_logprob: sum over token_ids; None unless log probabilities were asked for or needed. Of a beam
                   it counts the end token too.
    logprobs:      for each token, a map of its id; None unless asked for.
    finish_reason: None while it goes on; "stop", "length" or "cancelled".
    stop_reason:   the text or token id of `stop` or `stop_token_ids` that ended it, else None.
    generation_logits: [length, vocabulary] float32, when finished and asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    text_diff: str = ""
    token_ids_diff: list[int] = field(default_factory=list)
    generation_logits: np.ndarray | None = field(default=None, compare=False)

    @property
    def length(self) -> int:
        """Tokens of the output."""
        return len(self.token_ids)


@dataclass(frozen=True)
class RequestTimings:
    """Seconds since the request was made, its adapter's reading included; None: not reached.

    first_token: when streaming, as it went to the caller; else as the engine made it, known at the end.
    """

    first_token: float | None = None
    finished: float | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A prompt with its continuations, n of them, as they are now.

    prompt: None for a prompt of token ids. prompt_token_ids: as they were used, after truncation.
    adapter_tier: where the adapter was when the request came: "device", "host" or "disk"; empty without one.
    metrics: the engine's own times and counts, of the sequence that ended last; None before the first ends.
    context_logits: [prompt, vocabulary] float32, when asked for.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    lora_request: LoRARequest | None = None
    timings: RequestTimings = field(default_factory=RequestTimings)
    adapter_tier: str = ""
    metrics: RequestMetrics | None = None
    context_logits: np.ndarray | None = field(default=None, compare=False)
