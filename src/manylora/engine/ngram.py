"""NgramIndex: where the last tokens of a sequence occurred before, in its own prompt and output."""

from __future__ import annotations

import numpy as np

FEWEST_PLACES, MOST_PLACES = 2**10, 2**16
MULTIPLIER, SPREAD = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9
BITS = 64
MASK = 2**BITS - 1
FEW = 32  # up to this many tokens are added one by one


class NgramIndex:
    """A table for each length of n-grams: the position after the oldest, or newest, occurrence of each
    n-gram.

    A table has two to four entries per token, at most MOST_PLACES, of 4 bytes each. Of n-grams that share an
    entry only one is found, because matches are verified token by token.
    """

    def __init__(self, smallest: int, largest: int, oldest: bool) -> None:
        self._smallest, self._largest, self._oldest = smallest, largest, oldest
        self._powers = [pow(MULTIPLIER, n, 2**BITS) for n in range(largest)]
        self._reset(FEWEST_PLACES)

    def find(self, tokens: list[int], count: int) -> list[int]:
        """Up to `count` tokens that followed the earlier occurrence of the longest n-gram at the end of
        `tokens`.

        tokens: those of the last call, extended.
        """
        self._add(tokens)
        length = len(tokens)
        places = self._places_of(tokens, length)
        for size in range(min(self._largest, length - 1), self._smallest - 1, -1):
            start = int(self._tables[size - self._smallest, places[size - self._smallest]])
            if start and tokens[start - size : start] == tokens[-size:]:
                found = tokens[start : start + count]
                while len(found) < count:  # the occurrence overlaps the end
                    found.append(found[start + len(found) - length])
                return found
        return []

    def _reset(self, places: int) -> None:
        self._num_places, self._shift = places, BITS + 1 - places.bit_length()
        self._tables = np.zeros((self._largest - self._smallest + 1, places), np.int32)
        self._known = 0  # n-grams that end at this position or before are in the tables

    def _add(self, tokens: list[int]) -> None:
        """Add all n-grams except those at the end of the tokens."""
        last = len(tokens) - 1
        if 2 * last > self._num_places < MOST_PLACES:
            self._reset(min(MOST_PLACES, 1 << (4 * last - 1).bit_length()))
        if last - self._known > FEW:
            self._add_many(tokens, last)
        else:
            for end in range(self._known + 1, last + 1):
                for table, place in zip(self._tables, self._places_of(tokens, end), strict=False):
                    if not self._oldest or not table[place]:
                        table[place] = end
        self._known = max(self._known, last)

    def _add_many(self, tokens: list[int], last: int) -> None:
        first = max(0, self._known - self._largest)
        values = np.array(tokens[first:last], np.int64).astype(np.uint64)
        sums = np.zeros(len(values), np.uint64)
        for size, power in enumerate(self._powers, 1):
            if size > len(values):
                break
            sums[size - 1 :] += np.uint64(power) * values[: len(values) - size + 1]
            if size < self._smallest:
                continue
            skipped = max(size - 1, self._known - first)
            ends = np.arange(first + skipped + 1, last + 1, dtype=np.int32)
            places = (sums[skipped:] * np.uint64(SPREAD)) >> np.uint64(self._shift)
            table = self._tables[size - self._smallest]
            if self._oldest:
                new = table[places] == 0
                ends, places = ends[new][::-1], places[new][::-1]
            table[places] = ends  # for equal entries the last write wins

    def _places_of(self, tokens: list[int], end: int) -> list[int]:
        """Entries of the n-grams that end at a position, shortest first."""
        places, total = [], 0
        for size, power in enumerate(self._powers[:end], 1):
            total += power * (tokens[end - size] & MASK)
            if size >= self._smallest:
                places.append((total * SPREAD & MASK) >> self._shift)
        return places
