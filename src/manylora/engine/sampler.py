"""Sampler: logits to tokens, on the device of the logits, without waiting for it. A token depends only on its
own sequence and seed, never on the rest of the batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Rows

import numpy as np
import torch
from torch import Tensor

from manylora.engine.sequence import PENDING, Sequence, TokenCounts
from manylora.kernels.reference import best_tokens
from manylora.kernels.spec import NOT_FINITE
from manylora.kernels.transfer import upload
from manylora.request import SamplingConfig

UNITS = 2.0**40  # a probability of 1 as an integer: sums of integers do not depend on the order of addition
NEARLY = 1 - 2.0**-20  # factor on top_p, because probabilities are rounded to float32
ROUNDS = ((21, 11), (10, 11), (0, 10))  # of the search: lowest bit and number of bits of each round


def cut_by_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """The logits [R, vocab] float32 with -inf for all but the fewest most probable tokens, the first of equal
    ones, that together reach top_p [R, 1] float64. Rows are independent.
    """
    weights = (torch.softmax(logits, dim=-1).double() * UNITS).long()
    needed = (weights.sum(dim=-1, keepdim=True) * (top_p * NEARLY)).ceil().long()
    # The logits' bits as integers from 0 to 2**32 - 1 in descending order. + 0.0: -0.0 is equal to 0.0.
    raw = (logits + 0.0).view(torch.int32)
    keys = (2**31 - 1) - (raw ^ ((raw >> 31) & 0x7FFFFFFF)).long()
    bound = torch.zeros_like(needed)  # the leading bits of the last key that is kept
    for shift, bits in ROUNDS:
        size = 1 << bits
        # The first bucket has all keys below those with the bits found so far, the last one all above them.
        buckets = ((keys >> shift) - (bound * size - 1)).clamp_(0, size + 1)
        reached = weights.new_zeros(len(logits), size + 2).scatter_add_(1, buckets, weights).cumsum_(dim=-1)
        last = (reached < needed).sum(dim=-1, keepdim=True).clamp_(1, size)  # also if a row is not finite
        bound = bound * size + (last - 1)
    equal = keys == bound
    left = needed - reached.gather(1, last - 1)  # for the keys that are equal
    kept = (keys < bound) | (equal & ((equal.cumsum(dim=-1) - 1) * weights < left))
    return logits.masked_fill(~(kept | (top_p >= 1)), -torch.inf)


SPARE = 64  # tokens counted on the device before the host's counts are copied again


class Penalties:
    """Penalties of some rows of logits, kept from step to step.

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
        self._bases = upload(bases, torch.long, device)
        self._places = upload(places + bases, torch.long, device)
        self._counts = upload(counts, torch.float32, device)
        self._rates = upload(np.array(rates).T[:, :, None], torch.float32, device)
        self._next, self._room = width, width + SPARE
        self._subtracts = any(presence or frequency for _, presence, frequency in rates)
        self._has_empty = not all(len(ids) for ids, _ in seen)

    @property
    def is_full(self) -> bool:
        return self._next == self._room

    def count(self, tokens: Tensor, real: Tensor | None = None) -> None:
        """Count the next token of each row, [R] int64. real: [R] bool, rows that have one; None: all."""
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


NO_TOKEN = -2  # equal to no token
MIN_ORDERED = 64  # logits that are sorted for a row with a top-k
GUIDES_S = 0.05  # maximum wait for the masks of all guides of a step

Row = tuple[Sequence, int]
"""The sequence of a row of logits, and the number of its tokens before the next one."""


@torch.inference_mode()
def sample(logits: Tensor, rows: Rows[Row]) -> tuple[Tensor, Tensor | None]:
    """Tokens and log probabilities as from `Sampler.__call__`."""
    return Sampler(rows, logits.shape[-1], logits.device)(logits)


def adjust(logits: Tensor, rows: Rows[Row]) -> Tensor:
    """As `Sampler.adjust`."""
    return Sampler(rows, logits.shape[-1], logits.device).adjust(logits)


class Sampler:
    """Samples the next tokens of L rows of logits. The tables of the rows' parameters are made once and kept
    for all steps of a run.

    best: the device's implementation of `best_tokens`.
    pending: [L] int64 on the device: the last token of each row that only the device knows, and a negative
    number for other rows. None: the host knows all tokens.
    """

    def __init__(
        self,
        rows: Rows[Row],
        vocab: int,
        device: torch.device,
        pending: Tensor | None = None,
        best: Callable[[Tensor], Tensor] = best_tokens,
    ) -> None:
        self.rows, self._vocab, self._device, self._best = rows, vocab, device, best
        self._sequences = [sequence for sequence, _ in rows]
        params = [sequence.request.params for sequence in self._sequences]
        kinds = [*enumerate(params)]
        self._ruled = [i for i, p in kinds if p.bad_words or p.min_tokens or rows[i][0].guide is not None]
        self._biases = [(i, p.logit_bias[:vocab]) for i, p in kinds if p.logit_bias is not None]
        self._divisors = _column(params, "divisor", 1.0, torch.float32, device)
        self._penalised = _RowSubset([i for i, p in kinds if p.has_penalties], len(rows), device)
        self._drawn = _RowSubset([i for i, p in kinds if not p.greedy], len(rows), device)
        self._wanted = _RowSubset([i for i, p in kinds if p.return_log_probs], len(rows), device)
        self._penalties = self._new_penalties(pending) if self._penalised.rows else None
        # Rows that are drawn at random, grouped by how they are drawn.
        groups: dict[int, list[int]] = {}
        for i in self._drawn.rows:
            groups.setdefault(_num_ordered(self._sequences[i], vocab), []).append(i)
        self._groups = [
            _Drawing(size, _RowSubset(some, len(rows), device), [self._sequences[i] for i in some], device)
            for size, some in groups.items()
        ]
        rules = self._ruled or self._biases or self._penalised.rows
        self._adjusts = bool(rules) or self._divisors is not None
        self._is_plain = not (self._adjusts or self._drawn.rows or self._wanted.rows)
        if pending is not None:
            self._count_drawn(pending)

    @property
    def needs_tokens(self) -> bool:
        """Whether `advance` needs the tokens."""
        return self._penalties is not None or any(group.decays for group in self._groups)

    def advance(self, lengths: Rows[int], tokens: Tensor | None) -> None:
        """Each sequence has one more token. tokens: [L] int64 on the device, if `needs_tokens`; negative:
        none.
        """
        self.rows = [*zip(self._sequences, lengths, strict=True)]
        if tokens is None:
            return
        self._count_drawn(tokens)
        if self._penalties is not None and self._penalties.is_full:
            self._penalties = self._new_penalties(tokens)
        elif self._penalties is not None:
            self._penalties.count(self._penalised.of(tokens))

    def __call__(self, logits: Tensor, best: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Returns a token for each row [L] int64, NOT_FINITE if the logits are not finite, and log
        probabilities [L] float32, valid for the rows that ask for them; None if no row does.

        logits [L, vocab] float32, changed in place. best [L]: their `best_tokens`, if known.
        """
        tokens = self._best(logits) if best is None else best
        return (tokens, None) if self._is_plain else self._choose(logits, tokens)

    @torch.inference_mode()
    def _choose(self, logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """tokens: the best ones of the logits before they are adjusted."""
        finite = tokens != NOT_FINITE
        if self._adjusts:
            self.adjust(logits, finite)
            # NumPy on a CPU, as in `best_tokens`.
            on_cpu = logits.device.type == "cpu"
            tokens = torch.from_numpy(logits.numpy().argmax(-1)) if on_cpu else torch.argmax(logits, dim=-1)
        for group in self._groups:
            drawn = group.draw(group.some.of(logits), [self.rows[i] for i in group.some.rows])
            tokens = drawn if group.some.is_all else tokens.index_copy(0, group.some.where, drawn)
        log_probs = None
        if self._wanted.rows:
            taken = self._wanted.of(tokens).unsqueeze(1)
            found = torch.log_softmax(self._wanted.of(logits), dim=-1).gather(1, taken).squeeze(1)
            log_probs = torch.zeros(len(logits), device=logits.device)
            log_probs.index_copy_(0, self._wanted.where, found)
        return torch.where(finite, tokens, NOT_FINITE), log_probs

    def adjust(self, logits: Tensor, finite: Tensor | None = None) -> Tensor:
        """Apply in place: biases, temperatures, penalties, bans, guides. Returns which rows can be sampled,
        [L] bool: their logits were finite, and their guide was ready. finite: the former, if known.
        """
        finite = self._best(logits) != NOT_FINITE if finite is None else finite
        deadline = time.monotonic() + GUIDES_S
        for row, bias in self._biases:
            logits[row, : len(bias)] += upload(bias, torch.float32, logits.device)
        if self._divisors is not None:
            logits /= self._divisors
        if self._penalties is not None:
            self._penalties.apply(logits)
        for row in self._ruled:
            sequence, length = self.rows[row]
            params = sequence.request.params
            if params.bad_words or length - sequence.num_prompt < params.min_tokens:
                _ban(logits[row], sequence, length)
            mask = None if sequence.guide is None else sequence.guide.mask(deadline)
            if mask is not None:  # if other bans leave no token, the guide has priority
                mask = mask[: self._vocab]
                mask = np.pad(mask, (0, self._vocab - len(mask)))
                allowed = upload(mask, torch.bool, logits.device)
                logits[row].masked_fill_(~allowed, -torch.inf)
                none_left = torch.isneginf(logits[row]).all()
                logits[row].masked_fill_(allowed & none_left, 0.0)
            elif sequence.guide is not None:
                finite[row] = False
        return finite

    def _new_penalties(self, pending: Tensor | None) -> Penalties:
        rows = [(i, *self.rows[i]) for i in self._penalised.rows]
        made = Penalties(rows, self._vocab, self._device)
        if pending is not None:
            pending_rows = [sequence.tokens[length - 1] == PENDING for _, sequence, length in rows]
            made.count(self._penalised.of(pending), upload(pending_rows, torch.bool, self._device))
        return made

    def _count_drawn(self, tokens: Tensor) -> None:
        for group in self._groups:
            if group.decays:
                group.decay(group.some.of(tokens))


class _RowSubset:
    """Some of L rows. where: their indices [R] on the device."""

    def __init__(self, rows: list[int], count: int, device: torch.device) -> None:
        self.rows, self.is_all = rows, len(rows) == count
        self.where = upload(rows, torch.long, device) if rows else torch.empty(0, dtype=torch.long)

    def of(self, values: Tensor) -> Tensor:
        """values [L, ...] -> [R, ...]"""
        return values if self.is_all else values.index_select(0, self.where)


def uniform(seeds: Rows[int], indices: Rows[int], positions: Rows[int]) -> np.ndarray:
    """[R, 1] float64 in [0, 1), by splitmix64 of seed, return sequence and position of each row."""
    state = np.array(seeds, np.uint64)
    for words in (indices, positions):
        state = state + np.uint64(0x9E3779B97F4A7C15) * (np.array(words, np.uint64) + np.uint64(1))
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return ((state >> np.uint64(11)) / 2.0**53)[:, None]


def _ban(row: Tensor, sequence: Sequence, length: int) -> None:
    """Ban the last tokens of bad words that would be complete, and the end before it is allowed."""
    params, vocab, banned = sequence.request.params, row.shape[-1], set[int]()
    for *head, last in params.bad_words:
        if sequence.tokens[max(0, length - len(head)) : length] == head:
            banned.add(last)
    if params.end_id is not None and length - sequence.num_prompt < params.min_tokens:
        banned.add(params.end_id)
    banned = {token for token in banned if 0 <= token < vocab}
    if banned and len(banned) < vocab:
        row.index_fill_(0, upload(list(banned), torch.long, row.device), -torch.inf)


def _num_ordered(sequence: Sequence, vocab: int) -> int:
    """How many of the largest logits are sorted; 0: no top-k. A power of two, so that rows with similar top-k
    are drawn together; at least twice top-k, so that the first of equal logits are taken.
    """
    top_k = sequence.request.params.top_k
    return min(vocab, max(MIN_ORDERED, 1 << (2 * top_k - 1).bit_length())) if top_k else 0


class _Drawing:
    """Inverse-CDF sampling of R rows, after cuts by top-k and min-p, then by top-p, then by typical-p.
    Without top-k and typical-p nothing is sorted. size: see `_num_ordered`. decays: whether any top-p changes
    with the drawn tokens.
    """

    def __init__(self, size: int, some: _RowSubset, sequences: list[Sequence], device: torch.device) -> None:
        self.some, self._size = some, size
        params = [sequence.request.params for sequence in sequences]
        self._least = _column(params, "min_p", 0.0, torch.float32, device)
        self._typical = _column(params, "typical_p", 1.0, torch.float64, device)
        self._top_k = upload([[p.top_k or 0] for p in params], torch.long, device)
        shares = [[sequence.top_p or 1.0] for sequence in sequences]
        self._seeds = [p.seed or 0 for p in params]
        self._indices = [sequence.index for sequence in sequences]
        self.decays = any(p.top_p and p.top_p_decay != 1 for p in params)
        cuts = self.decays or any(share != [1.0] for share in shares)
        self._top_p = upload(shares, torch.float64, device) if cuts else None
        if self.decays:
            first = [(p.top_p, p.top_p_decay, p.top_p_min) if p.top_p else (1.0, 1.0, 0.0) for p in params]
            resets = [[NO_TOKEN if p.top_p_reset_id is None else p.top_p_reset_id] for p in params]
            self._course = upload(np.array(first).T[:, :, None], torch.float64, device)
            self._resets = upload(resets, torch.long, device)

    def decay(self, tokens: Tensor) -> None:
        """Adapt top-p to the next token of each row, [R] int64; negative: no token."""
        assert self._top_p is not None
        tokens, (first, decay, least) = tokens.unsqueeze(1), self._course
        after = torch.where(tokens == self._resets, first, torch.maximum(self._top_p * decay, least))
        self._top_p = torch.where(tokens >= 0, after, self._top_p)

    def draw(self, logits: Tensor, rows: Rows[Row]) -> Tensor:
        """logits [R, vocab] -> [R] int64."""
        positions = [length for _, length in rows]
        draws = upload(uniform(self._seeds, self._indices, positions), torch.float64, logits.device)
        if not self._size:  # from all logits, in the order of their ids
            cut = self._cut_by_min_p(logits, logits.amax(dim=-1, keepdim=True))
            if self._top_p is not None:
                cut = cut_by_top_p(cut, self._top_p)
            rank = _place(self._keep_typical(torch.softmax(cut, dim=-1)), draws)
            return rank.clamp_(max=logits.shape[-1] - 1).squeeze(1)
        # From the largest logits, in descending order; equal ones are ordered by id.
        ordered, order = _largest(logits, self._size)
        beyond = torch.arange(self._size, device=logits.device) >= self._top_k
        ordered = ordered.masked_fill(beyond, -torch.inf)
        probs = torch.softmax(self._cut_by_min_p(ordered, ordered[:, :1]), dim=-1)
        if self._top_p is not None:
            before = torch.cumsum(probs, dim=-1) - probs
            probs = probs.masked_fill(before >= self._top_p.float(), 0.0)
        rank = _place(self._keep_typical(probs), draws)
        # Penalties that overflow leave a row without probabilities. The other rows must not fail with it.
        rank = torch.minimum(rank, (probs > 0).sum(dim=-1, keepdim=True) - 1).clamp_(min=0)
        return torch.gather(order, 1, rank).squeeze(1)

    def _cut_by_min_p(self, logits: Tensor, largest: Tensor) -> Tensor:
        if self._least is None:
            return logits
        return logits.masked_fill(logits < largest + self._least.log(), -torch.inf)

    def _keep_typical(self, probs: Tensor) -> Tensor:
        """probs [R, n], whose sum need not be 1. Rows that do not ask for it are not changed."""
        if self._typical is None:
            return probs
        whole = probs.double() / probs.sum(dim=-1, keepdim=True)
        entropy = torch.special.entr(whole).sum(dim=-1, keepdim=True)
        order = (whole.log() + entropy).abs().argsort(dim=-1, stable=True)
        ordered = whole.gather(1, order)
        cut = (ordered.cumsum(dim=-1) - ordered >= self._typical) & (self._typical < 1)
        return probs.masked_fill(torch.zeros_like(cut).scatter(1, order, cut), 0.0)


def _largest(logits: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The `size` largest logits of each row in descending order, equal ones ordered by id, and their ids."""
    if size == logits.shape[-1]:
        return torch.sort(logits, dim=-1, descending=True, stable=True)
    ids = torch.topk(logits, size, dim=-1, sorted=False).indices.sort(dim=-1).values
    ordered, order = torch.sort(logits.gather(1, ids), dim=-1, descending=True, stable=True)
    return ordered, ids.gather(1, order)


def _column(
    params: Rows[SamplingConfig], name: str, default: float, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """[R, 1]: one parameter of each row. None: all rows have the default."""
    values = [[getattr(one, name)] for one in params]
    return upload(values, dtype, device) if any(value != [default] for value in values) else None


def _place(probs: Tensor, draws: Tensor) -> Tensor:
    """The index [R, 1] at which the sums of each row's probabilities exceed its number in [0, 1)."""
    cumulated = torch.cumsum(probs.double(), dim=-1)
    total = cumulated[:, -1:]
    target = torch.minimum(draws * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulated, target, right=True)
