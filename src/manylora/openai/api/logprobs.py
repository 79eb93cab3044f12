"""Log probabilities in the two shapes of the API, with alternatives taken from rows of logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from manylora.llmapi.outputs import CompletionOutput
from manylora.text.tokenizer import Tokenizer

__all__ = ["TokenLogprob", "chat_logprobs", "completion_logprobs", "from_logits", "of_output", "of_prompt"]


@dataclass(frozen=True)
class TokenLogprob:
    """logprob None: of the first token of a prompt. top: alternatives, the most probable first."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


def of_output(
    output: CompletionOutput, alternatives: Sequence[TokenLogprob], start: int = 0
) -> list[TokenLogprob]:
    """Of the output's tokens from `start` on. alternatives: of at least as many tokens, where they were asked
    for; else empty."""
    if alternatives:
        return list(alternatives[start : len(output.token_ids)])
    ids, known = output.token_ids[start:], (output.logprobs or [])[start:]
    return [TokenLogprob(i, one[i].logprob) for i, one in zip(ids, known, strict=False)]


def of_prompt(ids: Sequence[int], logits: np.ndarray, top: int) -> list[TokenLogprob]:
    """logits: [prompt, vocab]; row i is of the token after the i-th."""
    return [TokenLogprob(ids[0], None), *from_logits(ids[1:], logits[: len(ids) - 1], top)]


def chat_logprobs(found: Sequence[TokenLogprob], tokenizer: Tokenizer) -> dict[str, Any]:
    """The `logprobs` object of a chat choice."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        # Of a token that is a part of a character only the text of the whole would be right.
        whole = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": whole}

    content = [
        {**entry(one.token_id, one.logprob or 0.0), "top_logprobs": [entry(*other) for other in one.top]}
        for one in found
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    found: Sequence[TokenLogprob], tokenizer: Tokenizer, top: int, offset: int = 0
) -> dict[str, Any]:
    """The `logprobs` object of a completion choice. offset: characters of the text before these tokens."""
    tokens = [tokenizer.decode([one.token_id], skip_special_tokens=False) for one in found]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    alternatives = [_by_text(one, tokenizer) if one.logprob is not None else None for one in found]
    return {
        "tokens": tokens,
        "token_logprobs": [one.logprob for one in found],
        "top_logprobs": alternatives if top else None,
        "text_offset": offsets,
    }


def _by_text(one: TokenLogprob, tokenizer: Tokenizer) -> dict[str, float]:
    """Alternatives by their text; of two with one text, as parts of characters have, the more probable."""
    found: dict[str, float] = {}
    for token_id, value in one.top:
        found.setdefault(tokenizer.decode([token_id], skip_special_tokens=False), value)
    return found


def from_logits(ids: Sequence[int], logits: np.ndarray, top: int) -> list[TokenLogprob]:
    """logits: [tokens, vocab], a row for each id."""
    found = []
    for token_id, row in zip(ids, logits, strict=False):
        shifted = row.astype(np.float64) - row.max()
        log_probs = shifted - np.log(np.exp(shifted).sum())
        best = np.argpartition(-log_probs, min(top, len(row) - 1))[:top] if top else np.empty(0, int)
        best = best[np.argsort(-log_probs[best], kind="stable")]
        alternatives = tuple((int(i), float(log_probs[i])) for i in best)
        found.append(TokenLogprob(token_id, float(log_probs[token_id]), alternatives))
    return found
