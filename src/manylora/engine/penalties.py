"""Penalties: repetition, presence and frequency, from counts on the device to which sampled tokens are
added.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import torch
from torch import Tensor

from manylora.engine.sequence import PENDING, Sequence
from manylora.engine.token_counts import TokenCounts
from manylora.kernels.transfer import upload

SPARE = 64  # tokens counted on the device before the host's counts are copied again


class Penalties:
    """For some rows of logits, over the steps of a run.

    Stores each row's distinct tokens, as indices [R, W] into the flat logits, and their counts, [R, W]
    float32, where -1 means not seen. Unused entries repeat the row's first one, so that all entries with the
    same index write the same value, whichever is written last.

    rows: of the logits [., vocab], each with its sequence and the number of its tokens before the next one.
    """

    def __init__(self, rows: Rows[tuple[int, Sequence, int]], vocab: int, device: torch.device) -> None:
        seen = [_counts(sequence, length, vocab) for _, sequence, length in rows]
        width = max(len(ids) for ids, _ in seen)
        places = np.zeros((len(rows), width + SPARE), np.int64)
        counts = np.full(places.shape, -1, np.float32)
        for i, (ids, counted) in enumerate(seen):
            number = len(ids)
            if number:
                places[i, :number], places[i, number:] = ids, ids[0]
                counts[i, :number], counts[i, number:] = counted, counted[0]
        bases = np.array([[row * vocab] for row, _, _ in rows])
        params = [sequence.request.params for _, sequence, _ in rows]
        rates = [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in params]
        self._bases, self._places = (
            upload(bases, torch.long, device),
            upload(places + bases, torch.long, device),
        )
        self._counts = upload(counts, torch.float32, device)
        self._rates = upload(np.array(rates).T[:, :, None], torch.float32, device)
        self._next, self._room = width, width + SPARE
        self._subtracts = any(presence or frequency for _, presence, frequency in rates)
        self._has_empty = not all(len(ids) for ids, _ in seen)

    @property
    def is_full(self) -> bool:
        return self._next == self._room

    def count(self, tokens: Tensor, real: Tensor | None = None) -> None:
        """Count the next token of each row, [R] int64. Rows that were not finite may count anything. real:
        [R] bool, the rows that have a token; None: all.
        """
        places = self._bases + tokens.clamp(min=0).unsqueeze(1)
        same = self._places == places
        after = torch.where(same, self._counts, 0).amax(dim=1, keepdim=True) + 1
        if real is not None:  # the others repeat their first entry
            same &= real[:, None]
            places = torch.where(real[:, None], places, self._places[:, :1])
            after = torch.where(real[:, None], after, self._counts[:, :1])
        self._counts = torch.where(same, after, self._counts)
        self._places[:, self._next : self._next + 1] = places
        self._counts[:, self._next : self._next + 1] = after
        self._next += 1

    def apply(self, logits: Tensor) -> None:
        """Change logits [., vocab], contiguous, in place."""
        flat, counts = logits.view(-1), self._counts
        repetition, presence, frequency = self._rates
        scores = before = flat[self._places]
        scores = torch.where(scores < 0, scores * repetition, scores / repetition)
        if self._subtracts:
            scores = scores - (presence * (counts > 0) + frequency * counts)
        flat[self._places] = torch.where(counts < 0, before, scores) if self._has_empty else scores


def _counts(sequence: Sequence, length: int, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids [n] int64 and counts [n] float32 of the sequence's first `length` tokens, without a pending one."""
    length -= sequence.tokens[length - 1] == PENDING
    counts = sequence.counts
    if counts is None or counts.length > length:
        ignored = min(sequence.request.params.prompt_ignore_length, sequence.num_prompt)
        counts = sequence.counts = TokenCounts(sequence.tokens[:length], ignored, vocab)
    for token in sequence.tokens[counts.length : length]:
        counts.add(token)
    return counts.ids, counts.counts.copy()  # copied, because a draft's next row continues to count
