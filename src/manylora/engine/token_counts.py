"""TokenCounts: which tokens a sequence has, and how often, for penalties. Kept from step to step."""

from __future__ import annotations

from collections import Counter

import numpy as np


class TokenCounts:
    """Of the first `length` tokens of a sequence; each step adds its one token, whatever the length.

    tokens:      prompt and output so far. Ids from vocab on (prompt embeddings) are left out.
    num_ignored: tokens at the beginning that are not counted, but seen.
    """

    def __init__(self, tokens: list[int], num_ignored: int, vocab: int) -> None:
        counted = Counter(tokens[num_ignored:])
        seen = [token for token in dict.fromkeys(tokens) if token < vocab]
        self.length = len(tokens)
        self._slots = {token: slot for slot, token in enumerate(seen)}
        self._ids = np.array(seen, np.int64)
        self._counts = np.array([counted[token] for token in seen], np.float32)

    @property
    def ids(self) -> np.ndarray:
        """[n] int64: the distinct tokens that were seen."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> np.ndarray:
        """[n] float32: how often each of them was counted."""
        return self._counts[: len(self._slots)]

    def add(self, token: int) -> None:
        """The next token of the sequence."""
        self.length += 1
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):  # full
            room = max(16, slot)
            self._ids = np.concatenate((self._ids, np.zeros(room, np.int64)))
            self._counts = np.concatenate((self._counts, np.zeros(room, np.float32)))
        self._ids[slot] = token
        self._counts[slot] += 1

    def copy(self) -> TokenCounts:
        other = object.__new__(TokenCounts)
        other.length, other._slots = self.length, dict(self._slots)
        other._ids, other._counts = self._ids.copy(), self._counts.copy()
        return other
