"""The `logprobs` objects of chats and of completions, and log probabilities from rows of logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from manylora.llmapi.outputs import CompletionOutput
from manylora.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TokenLogprob:
    """logprob: None for the first token of a prompt. top: (token id, log probability), the best first. rank:
    1 for the most probable token; None: not known."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None


def output_logprobs(
    output: CompletionOutput, alternatives: Sequence[TokenLogprob], start: int = 0
) -> list[TokenLogprob]:
    """For the output's tokens from `start` on. alternatives: for each token so far, or empty."""
    if alternatives:
        return list(alternatives[start : len(output.token_ids)])
    ids, known = output.token_ids[start:], (output.logprobs or [])[start:]
    return [TokenLogprob(i, one[i].logprob) for i, one in zip(ids, known, strict=False)]


def prompt_logprobs(ids: Sequence[int], logits: np.ndarray, top: int) -> list[TokenLogprob]:
    """logits: [prompt, vocabulary] float32; row i predicts token i + 1."""
    return [TokenLogprob(ids[0], None), *from_logits(ids[1:], logits[: len(ids) - 1], top)]


def chat_logprobs(tokens: Sequence[TokenLogprob], tokenizer: Tokenizer) -> dict[str, Any]:
    """The `logprobs` object of a chat choice."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        # A token that is a part of a character decodes to a replacement character: its bytes are not known.
        data = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": data}

    content = [
        {**entry(one.token_id, one.logprob or 0.0), "top_logprobs": [entry(*other) for other in one.top]}
        for one in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokens: Sequence[TokenLogprob], tokenizer: Tokenizer, top: int, offset: int = 0
) -> dict[str, Any]:
    """The `logprobs` object of a completion choice. offset: of the first token, in the choice's text."""
    texts = [tokenizer.decode([one.token_id], skip_special_tokens=False) for one in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    alternatives = [_by_text(one, tokenizer) if one.logprob is not None else None for one in tokens]
    return {
        "tokens": texts,
        "token_logprobs": [one.logprob for one in tokens],
        "top_logprobs": alternatives if top else None,
        "text_offset": offsets,
    }


def _by_text(one: TokenLogprob, tokenizer: Tokenizer) -> dict[str, float]:
    """Alternatives by their text. Parts of characters have one text; the most probable of them is shown."""
    found: dict[str, float] = {}
    for token_id, value in one.top:
        found.setdefault(tokenizer.decode([token_id], skip_special_tokens=False), value)
    return found


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
