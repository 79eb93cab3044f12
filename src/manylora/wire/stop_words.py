"""Stop words matched on text, so that it does not matter how a word was cut into tokens."""

from __future__ import annotations

from collections.abc import Sequence


class StopWords:
    """For all sequences of one request. skip: as for TextStop.

    repeated: every text begins at the beginning again, as with accumulated tokens.
    """

    def __init__(self, words: Sequence[str], skip: int = 0, repeated: bool = False) -> None:
        self._words, self._skip, self._repeated = words, skip, repeated
        self._sequences: dict[tuple[int, int], TextStop] = {}

    @property
    def all_stopped(self) -> bool:
        """Whether every sequence that had text has come to a stop word."""
        return bool(self._sequences) and all(stop.stopped for stop in self._sequences.values())

    def cut(self, sequence: int, texts: Sequence[str]) -> list[str]:
        """The next text of each beam of a sequence, up to the end of a stop word."""
        if not self._words:
            return list(texts)
        cut = []
        for beam, text in enumerate(texts):
            place = (sequence, beam)
            if self._repeated or place not in self._sequences:
                self._sequences[place] = TextStop(self._words, self._skip)
            cut.append(self._sequences[place].feed(text))
        return cut


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
        """The part of the next text that is output: up to the end of the first stop word, no more after."""
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
