"""Continuation: one output as it grows, from tokens to text, and where it ends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from manylora.llmapi.decoding import StopRules
from manylora.llmapi.outputs import CompletionOutput, Logprob
from manylora.request import FinishReason
from manylora.text.tokenizer import Tokenizer

__all__ = ["Continuation", "overlap"]


class Continuation:
    """tokenizer: None leaves the text empty.

    Text that might turn out to be the beginning of a stop text, or half a character, is held back until it is
    settled, so what was shown once stays.
    """

    def __init__(self, rules: StopRules, tokenizer: Tokenizer | None) -> None:
        self._rules = rules
        wanted = tokenizer is not None and (rules.detokenize or rules.texts)
        self._stream = tokenizer.stream(rules.skip_special_tokens) if tokenizer and wanted else None
        self._text = ""
        self._shown = 0  # characters of _text that are settled
        self._search_from = 0  # no stop text begins before this character
        self._reported = (0, 0)  # characters and tokens of the last report
        self._log_probs: list[float] = []
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.generation_logits: list[np.ndarray] = []  # together [tokens of the engine, vocabulary]
        self.score: float | None = None  # of a beam, instead of the sum

    @property
    def cumulative_logprob(self) -> float:
        return sum(self._log_probs) if self.score is None else self.score

    def extend(
        self, token_ids: Sequence[int], log_probs: Sequence[float], finish: FinishReason | None
    ) -> None:
        """Take what the engine made; `finish`: the engine ends it. Without effect once it has ended."""
        if self.finish_reason is not None:
            return
        start = len(self.token_ids)
        for i, token in enumerate(token_ids):
            if len(self.token_ids) >= self._rules.min_tokens and self._is_stop(token):
                if self._rules.include and token in self._rules.ids:
                    self._append(token, log_probs, i)
                self._end(start, FinishReason.STOP, self._rules.ids.get(token))
                return
            self._append(token, log_probs, i)
            if self._rules.texts:
                self._add_text(start, final=False)
                start = len(self.token_ids)
                if self._find_stop():
                    return
        if finish is not None:
            self._end(start, finish, None)
        elif not self._rules.texts:
            self._add_text(start, final=False)

    def report(self, index: int, log_probs: bool, cumulative: bool) -> CompletionOutput:
        """The output so far, and what is new in it."""
        shown, tokens = self._reported
        text = self._text[: self._shown] if self._rules.detokenize else ""
        self._reported = (len(text), len(self.token_ids))
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=list(self.token_ids),
            cumulative_logprob=self.cumulative_logprob if cumulative else None,
            logprobs=self._known() if log_probs else None,
            finish_reason=self.finish_reason.value if self.finish_reason else None,
            stop_reason=self.stop_reason,
            text_diff=text[shown:],
            token_ids_diff=self.token_ids[tokens:],
            generation_logits=self._logits(),
        )

    def advance(self) -> str:
        """The text that is new since the last report, as a report of nothing else."""
        first = self._reported[0]
        self._reported = (self._shown, len(self.token_ids))
        return self._text[first : self._shown]

    def _logits(self) -> np.ndarray | None:
        """When finished: of every token, also where a stop text ended the output before the engine did."""
        if not self.generation_logits or self.finish_reason is None:
            return None
        return np.concatenate(self.generation_logits)[: len(self.token_ids)]

    def _known(self) -> list[dict[int, Logprob]]:
        pairs = zip(self.token_ids, self._log_probs, strict=False)
        return [{token: Logprob(value)} for token, value in pairs]

    def _is_stop(self, token: int) -> bool:
        return token in self._rules.end_ids or token in self._rules.ids

    def _append(self, token: int, log_probs: Sequence[float], i: int) -> None:
        self.token_ids.append(token)
        if log_probs:
            self._log_probs.append(log_probs[i])

    def _end(self, start: int, reason: FinishReason, stop_reason: int | str | None) -> None:
        self._add_text(start, final=True)
        if not self._find_stop():
            self.finish_reason, self.stop_reason = reason, stop_reason
            self._shown = len(self._text)

    def _add_text(self, start: int, final: bool) -> None:
        """Decode the tokens from `start` on, each of which comes here once."""
        if self._stream is None:
            return
        self._text += self._stream.add(self.token_ids[start:], final)
        if not self._rules.texts:
            self._shown = len(self._text)

    def _find_stop(self) -> bool:
        """End at the first stop text, if there is one; else settle what cannot belong to one."""
        texts = self._rules.texts
        if len(self.token_ids) < self._rules.min_tokens:
            self._search_from = self._shown = len(self._text)
            return False
        first = max(self._search_from, self._shown)
        found = [(at, text) for text in texts if (at := self._text.find(text, first)) >= 0]
        if not found:
            held = max((overlap(self._text, text, first) for text in texts), default=0)
            self._shown = len(self._text) - held
            return False
        at, text = min(found)
        self._text = self._text[: at + len(text) if self._rules.include else at]
        self._shown = len(self._text)
        self.finish_reason, self.stop_reason = FinishReason.STOP, text
        return True


def overlap(text: str, word: str, start: int = 0) -> int:
    """The largest number of characters at the end of text[start:] with which the word, not complete yet,
    begins."""
    longest = min(len(word) - 1, len(text) - start)
    return next((n for n in range(longest, 0, -1) if text.endswith(word[:n])), 0)
