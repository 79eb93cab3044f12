"""DecodeRun: consecutive steps that each decode one token of the same sequences."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from manylora.engine.sequence import Sequence


class DecodeRun:
    """Caches what stays the same from one such step to the next, instead of recomputing it per sequence.

    sequences: in the order of their rows; those of one adapter are adjacent.
    positions: [S] int64, of the token that each computes next; a new array after each step.
    can_run_ahead: see `Sequence`.
    """

    def __init__(self, sequences: Iterable[Sequence], tokens_per_block: int) -> None:
        self.sequences = tuple(sorted(sequences, key=lambda s: s.place(s.num_computed, s.num_computed + 1)))
        self.positions = np.array([sequence.num_computed for sequence in self.sequences])
        self.can_run_ahead = all(sequence.can_run_ahead for sequence in self.sequences)
        self._size = tokens_per_block
        self._rooms = np.array([self._room(sequence) for sequence in self.sequences])
        self._num_left = min(map(_steps_left, self.sequences))
        self._num_fit = int((self._rooms - self.positions).min())  # steps for which all sequences have blocks

    @staticmethod
    def takes(sequence: Sequence) -> bool:
        """Whether a sequence that decodes its next token now will continue to do so until it ends."""
        alone = sequence.guide is None and sequence.beams is None and not sequence.drafts
        length = sequence.num_computed + 1
        return alone and sequence.num_prompt < length and sequence.rope_length <= length

    @property
    def goes_on(self) -> bool:
        """Whether all sequences may compute one more token, judging by their lengths."""
        return self._num_left > 0

    def step_done(self) -> None:
        self.positions = self.positions + 1
        self._num_left -= 1
        self._num_fit -= 1

    def without_room(self) -> list[Sequence]:
        """Sequences whose blocks have no space for the token that they compute next."""
        if self._num_fit > 0:
            return []
        return [self.sequences[row] for row in np.flatnonzero(self.positions >= self._rooms)]

    def has_grown(self, sequence: Sequence) -> None:
        """Record that it got more blocks."""
        self._rooms[self.sequences.index(sequence)] = self._room(sequence)
        self._num_fit = int((self._rooms - self.positions).min())

    def _room(self, sequence: Sequence) -> int:
        return len(sequence.kv.blocks) * self._size


def _steps_left(sequence: Sequence) -> int:
    """Steps until its last token, its rotary scaling or its next draft requires another kind of step."""
    last, limit = sequence.max_len - 1, sequence.rope_limit
    if limit is not None and sequence.rope_length <= limit:
        last = min(last, limit)
    if sequence.drafter is not None:
        last = min(last, sequence.drafter.wakes_at - 1)
    return last - sequence.num_computed
