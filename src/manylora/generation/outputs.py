"""CompletionOutput: one output of a prompt, with log probabilities of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Logprob:
    """Natural log, after penalties and temperature. rank 1: the most probable token."""

    logprob: float
    rank: int | None = None


@dataclass(frozen=True)
class LoraVersion:
    """Which version of an adapter, counted from 1, generated the tokens [start, end)."""

    name: str
    version: int
    digest: str
    start: int
    end: int


@dataclass(frozen=True)
class CompletionOutput:
    """One output of a prompt so far.

    token_ids: without the end token, and without a stop token unless include_stop_str_in_output. text_diff,
    token_ids_diff: new since the previous RequestOutput. cumulative_logprob: None unless computed; for a beam
    it includes the end token. logprobs: per token, a mapping from its id; None unless requested.
    finish_reason: None while running; then "stop", "length" or "cancelled". stop_reason: the text or id of
    `stop` or `stop_token_ids` that ended it. generation_logits: [length, vocabulary] float32, if finished and
    requested. lora_versions: versions of its adapter, covering all tokens.
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
class TokenLogprob:
    """logprob: None for a prompt's first token. top: (token id, log probability), best first."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None


def from_logits(ids: Sequence[int], logits: np.ndarray, top: int) -> list[TokenLogprob]:
    """logits: [tokens, vocabulary], a row for each id. top: number of alternatives."""
    tokens = []
    for token_id, row in zip(ids, logits, strict=False):
        shifted = row.astype(np.float64) - row.max()
        log_probs = shifted - np.log(np.exp(shifted).sum())
        best = np.argpartition(-log_probs, min(top, len(row) - 1))[:top] if top else np.empty(0, int)
        best = best[np.argsort(-log_probs[best], kind="stable")]
        alternatives = tuple((int(i), float(log_probs[i])) for i in best)
        rank = 1 + int((log_probs > log_probs[token_id]).sum())
        tokens.append(TokenLogprob(token_id, float(log_probs[token_id]), alternatives, rank))
    return tokens
