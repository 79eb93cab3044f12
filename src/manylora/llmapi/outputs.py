"""RequestOutput: the result of one prompt, with a CompletionOutput for each of its outputs."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from manylora.llmapi.lora import LoRAChoice
from manylora.request import RequestMetrics


@dataclass(frozen=True)
class Logprob:
    """Natural log of a token's probability, after penalties and temperature. rank 1: the most probable
    token.
    """

    logprob: float
    rank: int | None = None


@dataclass(frozen=True)
class LoraVersion:
    """Tokens [start, end) of an output and the adapter content that generated them. version: counts the
    contents of the name, from 1.
    """

    name: str
    version: int
    digest: str
    start: int
    end: int


@dataclass(frozen=True)
class CompletionOutput:
    """One output of a prompt so far.

    token_ids:     without the end token, and without a stop token unless include_stop_str_in_output.
    text_diff, token_ids_diff: new since the previous RequestOutput; everything if not streaming.
    cumulative_logprob: sum over token_ids; None unless log probabilities were computed. For a beam it
                   includes the end token.
    logprobs:      per token, a mapping from its id; None unless requested.
    finish_reason: None while running; then "stop", "length" or "cancelled".
    stop_reason:   the `stop` text or the `stop_token_ids` id that ended it, otherwise None.
    generation_logits: [length, vocabulary] float32, if finished and requested.
    lora_versions: versions of its adapter, covering all tokens; empty for the base model.
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
    lora_versions: tuple[LoraVersion, ...] = ()

    @property
    def length(self) -> int:
        """In tokens."""
        return len(self.token_ids)


@dataclass(frozen=True)
class RequestTimings:
    """Seconds since the request was created, including the time to read its adapter. None: not reached yet.

    first_token: when it was published to the caller; without streaming, when the engine generated it.
    """

    first_token: float | None = None
    finished: float | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A prompt with its n outputs in their current state.

    prompt: None for a prompt of token ids. prompt_token_ids: after truncation.
    adapter_tier: where the adapter was found: "device", "host" or "disk"; empty without an adapter.
    metrics: the engine's times and counts for the sequence that ended last; None before the first ends.
    context_logits: [prompt, vocabulary] float32, if requested.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    lora_request: LoRAChoice | None = None
    timings: RequestTimings = field(default_factory=RequestTimings)
    adapter_tier: str = ""
    metrics: RequestMetrics | None = None
    context_logits: np.ndarray | None = field(default=None, compare=False)
