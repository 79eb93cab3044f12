"""The `logprobs` objects of chats and of completions, and log probabilities from rows of logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from manylora.generation.outputs import CompletionOutput, TokenLogprob, from_logits
from manylora.generation.tokenizer import TextStream, Tokenizer


def output_logprobs(
    output: CompletionOutput, alternatives: Sequence[TokenLogprob], start: int = 0
) -> list[TokenLogprob]:
    """Of the output's tokens from `start` on. alternatives: for each token so far, or empty."""
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
        # A token that is part of a character decodes to a replacement character, so its bytes are unknown.
        data = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": data}

    content = [
        {**entry(one.token_id, one.logprob or 0.0), "top_logprobs": [entry(*other) for other in one.top]}
        for one in tokens
    ]
    return {"content": content, "refusal": None}


class TextOffsets:
    """Where tokens start in the text that `stream` decodes. num_unseen: first tokens without text."""

    def __init__(self, stream: TextStream, start: int, num_unseen: int = 0) -> None:
        self._stream, self._at, self._num_unseen = stream, start, num_unseen

    def take(self, ids: Sequence[int]) -> list[int]:
        """Offsets of the next tokens. All parts of a character have the offset of that character."""
        offsets = []
        for token_id in ids:
            offsets.append(self._at)
            if self._num_unseen > 0:
                self._num_unseen -= 1
            else:
                self._at += len(self._stream.add([token_id], False))
        return offsets


def completion_logprobs(
    tokens: Sequence[TokenLogprob], tokenizer: Tokenizer, top: int, offsets: TextOffsets
) -> dict[str, Any]:
    """The `logprobs` object of a completion choice."""

    def by_text(one: TokenLogprob) -> dict[str, float]:
        """Alternatives by their text. Parts of characters share one text; only the most probable is shown."""
        found: dict[str, float] = {}
        for token_id, value in one.top:
            found.setdefault(tokenizer.decode([token_id], skip_special_tokens=False), value)
        return found

    alternatives = [by_text(one) if one.logprob is not None else None for one in tokens]
    return {
        "tokens": [tokenizer.decode([one.token_id], skip_special_tokens=False) for one in tokens],
        "token_logprobs": [one.logprob for one in tokens],
        "top_logprobs": alternatives if top else None,
        "text_offset": offsets.take([one.token_id for one in tokens]),
    }


def joined(first: dict[str, Any] | None, second: dict[str, Any] | None) -> dict[str, Any] | None:
    """Two such objects joined to one."""
    if first is None or second is None:
        return first or second
    return {name: None if one is None else one + second[name] for name, one in first.items()}


def ranked_logprobs(
    ids: Sequence[int], logits: np.ndarray, top: int, tokenizer: Tokenizer
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's `prompt_logprobs`: each prompt token's entry and the most probable ones, by id."""

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        return {"logprob": logprob, "rank": rank, "decoded_token": text}

    found: list[dict[str, dict[str, Any]] | None] = [None]
    for one in prompt_logprobs(ids, logits, top)[1:]:
        entries = {str(one.token_id): entry(one.token_id, one.logprob or 0.0, one.rank or 1)}
        for number, (token_id, logprob) in enumerate(one.top, 1):
            entries.setdefault(str(token_id), entry(token_id, logprob, number))
        found.append(entries)
    return found
