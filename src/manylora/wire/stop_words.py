"""TextStop: stop words matched on text, so that it does not matter how a word was cut into tokens."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["TextStop"]


class TextStop:
    """For one sequence. The stop word itself stays in the output, as for words matched on tokens.

    skip: characters at the beginning where no word counts (the prompt, where it is echoed).
    """

    def __init__(self, words: Sequence[str], skip: int = 0) -> None:
        self._words = [word for word in words if word]
        self._longest = max(map(len, self._words), default=0)
        self._skip = skip
        self._tail = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """What of the next piece is output: up to the first stop word that ends in it, nothing after that."""
        if self.stopped or not self._words:
            return "" if self.stopped else text
        passed = min(self._skip, len(text))
        self._skip -= passed
        seen = self._tail + text[passed:]
        ends = [at + len(word) for word in self._words if (at := seen.find(word)) >= 0]
        if ends:
            self.stopped = True
            return text[: passed + min(ends) - len(self._tail)]
        self._tail = seen[-(self._longest - 1) :] if self._longest > 1 else ""
        return text
