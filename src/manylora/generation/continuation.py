"""Continuation: one growing output. Turns tokens into text and applies the stop rules. StopTexts finds texts
that end an output, for every entry point.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from manylora.generation.decoding import StopRules
from manylora.generation.outputs import CompletionOutput, Logprob, LoraVersion
from manylora.generation.tokenizer import Tokenizer
from manylora.request import AdapterVersion, FinishReason


class StopTexts:
    """Texts that end an output wherever they appear. Empty ones are ignored."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = [text for text in texts if text]
        self.longest = max(map(len, self._texts), default=0)

    def __bool__(self) -> bool:
        return bool(self._texts)

    def find(self, text: str, start: int = 0) -> list[tuple[int, str]]:
        """The first place of each text in text[start:]: (index in `text`, the stop text), if it is there."""
        return [(at, word) for word in self._texts if (at := text.find(word, start)) >= 0]

    def begun(self, text: str, start: int = 0) -> int:
        """How many characters at the end of text[start:] may be the beginning of one of them."""
        return max((overlap(text, word, start) for word in self._texts), default=0)


def overlap(text: str, word: str, start: int = 0) -> int:
    """Length of the longest proper prefix of `word` that text[start:] ends with."""
    longest = min(len(word) - 1, len(text) - start)
    return next((n for n in range(longest, 0, -1) if text.endswith(word[:n])), 0)


class Continuation:
    """tokenizer: None leaves the text empty.

    Text that may become a stop text, or is half a character, is withheld until that is known. Reported text
    therefore never changes.
    """

    def __init__(self, rules: StopRules, tokenizer: Tokenizer | None) -> None:
        self._rules, self._stops = rules, StopTexts(rules.texts)
        decode = rules.detokenize or rules.texts
        self._stream = tokenizer.stream(rules.skip_special_tokens) if tokenizer and decode else None
        self._text = ""
        self._safe = 0  # characters of _text that may be reported
        self._search_from = 0  # no stop text begins before this character
        self._reported = (0, 0)  # characters and tokens in the last report
        self._log_probs: list[float] = []
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.generation_logits: list[np.ndarray] = []  # concatenated: [tokens of the engine, vocabulary]
        self.versions: tuple[AdapterVersion, ...] = ()  # versions of its adapter
        self.score: float | None = None  # score of a beam, used instead of the sum

    @property
    def cumulative_logprob(self) -> float:
        return sum(self._log_probs) if self.score is None else self.score

    def extend(
        self, token_ids: Sequence[int], log_probs: Sequence[float], finish: FinishReason | None
    ) -> None:
        """Add tokens from the engine. finish: why the engine ended the output. No effect after the output has
        ended.
        """
        if self.finish_reason is not None:
            return
        start = len(self.token_ids)
        for i, token in enumerate(token_ids):
            stops = token in self._rules.end_ids or token in self._rules.ids
            if stops and len(self.token_ids) >= self._rules.min_tokens:
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
        """The output so far, and what is new since the last report. log_probs, cumulative: whether to include
        them.
        """
        num_chars, num_tokens = self._reported
        text = self._text[: self._safe] if self._rules.detokenize else ""
        self._reported = (len(text), len(self.token_ids))
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=list(self.token_ids),
            cumulative_logprob=self.cumulative_logprob if cumulative else None,
            logprobs=self._token_logprobs() if log_probs else None,
            finish_reason=self.finish_reason.value if self.finish_reason else None,
            stop_reason=self.stop_reason,
            text_diff=text[num_chars:],
            token_ids_diff=self.token_ids[num_tokens:],
            generation_logits=self._logits(),
            lora_versions=self._lora_versions(),
        )

    def advance(self) -> str:
        """A cheaper `report`: only the text that is new since the last one."""
        first = self._reported[0]
        self._reported = (self._safe, len(self.token_ids))
        return self._text[first : self._safe]

    def _logits(self) -> np.ndarray | None:
        """[length, vocabulary] of a finished output, which a stop text may have ended before the engine
        did.
        """
        if not self.generation_logits or self.finish_reason is None:
            return None
        return np.concatenate(self.generation_logits)[: len(self.token_ids)]

    def _lora_versions(self) -> tuple[LoraVersion, ...]:
        """Versions for the tokens in the output, which may end before the engine's."""
        count, found = len(self.token_ids), []
        ends = [*(one.start for one in self.versions[1:]), count]
        for one, end in zip(self.versions, ends, strict=False):
            if one.start < count or not one.start:
                found.append(LoraVersion(one.name, one.number, one.digest, one.start, min(end, count)))
        return tuple(found)

    def _token_logprobs(self) -> list[dict[int, Logprob]]:
        pairs = zip(self.token_ids, self._log_probs, strict=False)
        return [{token: Logprob(value)} for token, value in pairs]

    def _append(self, token: int, log_probs: Sequence[float], i: int) -> None:
        self.token_ids.append(token)
        if log_probs:
            self._log_probs.append(log_probs[i])

    def _end(self, start: int, reason: FinishReason, stop_reason: int | str | None) -> None:
        self._add_text(start, final=True)
        if not self._find_stop():
            self.finish_reason, self.stop_reason = reason, stop_reason
            self._safe = len(self._text)

    def _add_text(self, start: int, final: bool) -> None:
        """Decode the tokens from `start` on, which have not been decoded yet."""
        if self._stream is None:
            return
        self._text += self._stream.add(self.token_ids[start:], final)
        if not self._rules.texts:
            self._safe = len(self._text)

    def _find_stop(self) -> bool:
        """End the output at the first stop text. Without one, mark text that cannot belong to a stop text as
        safe.
        """
        if len(self.token_ids) < self._rules.min_tokens:
            self._search_from = self._safe = len(self._text)
            return False
        first = max(self._search_from, self._safe)
        found = self._stops.find(self._text, first)
        if not found:
            self._safe = len(self._text) - self._stops.begun(self._text, first)
            return False
        at, text = min(found)
        self._text = self._text[: at + len(text) if self._rules.include else at]
        self._safe = len(self._text)
        self.finish_reason, self.stop_reason = FinishReason.STOP, text
        return True
