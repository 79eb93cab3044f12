"""Speculation: drafts of the next tokens of each sequence, from n-grams of its own tokens, and whether they
save time. The model verifies every draft token, so these decisions change the time only, never the tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from manylora.config.engine import EngineConfig
from manylora.request import Request

FEWEST_PLACES, MOST_PLACES = 2**10, 2**16
MULTIPLIER, SPREAD = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9
BITS = 64
MASK = 2**BITS - 1
FEW = 32  # up to this many tokens are added one by one


class NgramIndex:
    """For each length of n-grams a table: the position after the oldest, or newest, occurrence. Of n-grams
    that share an entry only one is found: matches are verified token by token.
    """

    def __init__(self, smallest: int, largest: int, oldest: bool) -> None:
        self._smallest, self._largest, self._oldest = smallest, largest, oldest
        self._powers = [pow(MULTIPLIER, n, 2**BITS) for n in range(largest)]
        self._reset(FEWEST_PLACES)

    def find(self, tokens: list[int], count: int) -> list[int]:
        """Up to `count` tokens that followed the longest n-gram at the end of `tokens`, which only grow."""
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


LEAST_RATE = 0.1  # of draft tokens that are accepted; below it a sequence pauses in any case
FIRST_RATE = 0.5
WEIGHT = 0.25  # of the last draft in the rate
FIRST_PAUSE, LONGEST_PAUSE = 32, 512  # tokens that a sequence decodes without drafts
PLAIN_EVERY = 64  # steps with drafts, after which one without is measured
RETRY_EVERY = 256  # steps without, after which drafts that cost too much are measured again
FORGETS = 16  # steps that the averages of times go back
FIRST_PLAIN = 2  # steps without drafts before the first with some
TRIAL = 6  # steps with drafts that show whether they pay
MARGIN = 1.05  # tokens a second with drafts over those without, below which drafts stop
LONGEST_REST = 4096  # steps after which drafts that did not pay are tried again, at the latest


class Drafter:
    """Drafts the next tokens of one sequence.

    length: of its next draft. rate: moving average of the share of accepted tokens. wakes_at: it drafts
    nothing until the sequence has this many tokens.
    """

    def __init__(self, index: NgramIndex, most: int) -> None:
        self._index, self._most = index, most
        self.length, self.rate, self.wakes_at = most, FIRST_RATE, 0
        self._pause, self._price = FIRST_PAUSE, 0.0

    def propose(self, tokens: list[int], room: int, price: float) -> list[int]:
        """price: of a draft token, in tokens; see `StepTimes`."""
        self._price = price
        if len(tokens) < self.wakes_at or price == math.inf:
            return []
        if self.rate < price:
            self._rest(len(tokens))
            return []
        count = min(self.length, room)
        return self._index.find(tokens, count) if count > 0 else []

    def record_result(self, num_drafted: int, num_accepted: int, length: int) -> None:
        """Record that the model has verified a draft. length: tokens of the sequence before the draft."""
        self.rate += WEIGHT * (num_accepted / num_drafted - self.rate)
        all_right = num_accepted == num_drafted
        self.length = min(self._most, self.length + 2 if all_right else num_accepted + 1)
        if self.rate < max(self._price, LEAST_RATE):
            self._rest(length + num_accepted)
        elif all_right:
            self._pause = FIRST_PAUSE

    def _rest(self, length: int) -> None:
        """Pause, each time twice as long. The first draft afterwards decides whether to continue."""
        self.wakes_at = length + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        self.rate = min(1.0, 1.3 * max(self._price, LEAST_RATE))


@dataclass
class _Average:
    """Moving averages over the last steps: seconds, draft tokens, and tokens that a step generated."""

    seconds: float = 0.0
    tokens: float = 0.0
    given: float = 0.0
    count: int = 0

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.given / self.seconds if self.seconds else 0.0

    def add(self, seconds: float, tokens: int, given: int) -> None:
        self.count += 1
        weight = 1 / min(self.count, FORGETS)
        if self.count > 4:
            seconds = min(seconds, 2 * self.seconds)  # something else has taken the processor
        self.seconds += weight * (seconds - self.seconds)
        self.tokens += weight * (tokens - self.tokens)
        self.given += weight * (given - self.given)


@dataclass
class _StepKind:
    """Times of steps that decode about the same number of sequences, without drafts and with them."""

    plain: _Average = field(default_factory=_Average)
    drafted: _Average = field(default_factory=_Average)
    since_plain: int = 0  # steps since the last one without drafts
    since_drafted: int = 0
    rest: int = RETRY_EVERY  # steps without drafts, after which they are tried again

    @property
    def loses(self) -> bool:
        """Whether drafts do not make generation faster."""
        return self.drafted.count >= TRIAL and self.drafted.speed < MARGIN * self.plain.speed


class StepTimes:
    """How long decode steps take, with drafts and without, by the number of sequences.

    The price of a draft token is the time that it adds to a step, divided by the time of a token in a step
    without drafts. A draft saves time if the share of its tokens that are accepted is larger than the price.
    Tokens per second, with drafts and without, are measured, too.
    """

    def __init__(self) -> None:
        self._kinds: dict[int, _StepKind] = {}

    def add(self, num_sequences: int, num_drafted: int, seconds: float, num_accepted: int = 0) -> None:
        kind = self._kind(num_sequences)
        if num_drafted:
            kind.drafted.add(seconds, num_drafted, num_sequences + num_accepted)
            kind.since_plain, kind.since_drafted = kind.since_plain + 1, 0
            if kind.drafted.count == TRIAL:
                kind.rest = min(2 * kind.rest, LONGEST_REST) if kind.loses else RETRY_EVERY
        else:
            kind.plain.add(seconds, 0, num_sequences)
            kind.since_plain, kind.since_drafted = 0, kind.since_drafted + 1
            if kind.loses and kind.since_drafted >= kind.rest:
                kind.drafted = _Average()

    def price(self, num_sequences: int) -> float:
        """Of a draft token. 0: unknown. Infinite: the next step must have no drafts."""
        kind = self._kind(num_sequences)
        plain, drafted = kind.plain, kind.drafted
        if plain.count < FIRST_PLAIN or kind.since_plain >= PLAIN_EVERY or kind.loses:
            return math.inf
        if not drafted.count or kind.since_drafted >= RETRY_EVERY:
            return 0.0
        added = max(0.0, drafted.seconds - plain.seconds) / drafted.tokens
        return added * num_sequences / plain.seconds if plain.seconds else 0.0

    def _kind(self, count: int) -> _StepKind:
        return self._kinds.setdefault(count if count <= 8 else 7 + count // 8, _StepKind())


class Speculation:
    """The drafts of one engine. The engine records the time of each step."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self.times = StepTimes()

    @property
    def is_on(self) -> bool:
        return self._config.max_draft_len > 0

    def drafter(self, request: Request) -> Drafter | None:
        """For one sequence. None: drafts are off, would not be exact, or come with the request."""
        config, params = self._config, request.params
        decays = bool(params.top_p) and params.top_p_decay != 1
        others = params.beam_width > 1 or params.guide is not None or request.prompt_table is not None
        if not (self.is_on and params.use_drafts) or others or decays or request.draft:
            return None
        largest = config.max_matching_ngram_size
        smallest = min(config.min_matching_ngram_size, largest)
        return Drafter(NgramIndex(smallest, largest, config.ngram_use_oldest), config.max_draft_len)

    def num_rows(self, num_running: int, prompts: bool) -> int:
        """Rows for drafts, beside one of each running sequence. prompts: whether prompts wait, too."""
        config = self._config
        if 0 < config.max_draft_concurrency < num_running:
            return 0
        others = config.max_batch_size + config.chunk_tokens - 1 if prompts else num_running
        return max(0, min(config.max_decode_rows - num_running, config.max_num_tokens - others))

    def record_step(self, counts: Iterable[int], seconds: float, num_accepted: int = 0) -> None:
        """Record a decode step. counts: rows of each sequence. num_accepted: of its draft tokens."""
        if self.is_on:
            rows = list(counts)
            self.times.add(len(rows), sum(rows) - len(rows), seconds, num_accepted)
