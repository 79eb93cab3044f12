"""Scheduler: decides which tokens of which sequences the next step computes. Pure Python over counters."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

from manylora.engine.kv_cache import KvCache
from manylora.engine.sequence import Sequence

__all__ = ["AdapterRoom", "Chunk", "Scheduler", "Step"]

# Of the sequences that must wait for a place in the batch, so many of the first have their adapters brought.
MOST_PREFETCHED = 8

# A sequence that waits for adapter room lets this many later ones pass before it holds the door.
MAX_OVERTAKES = 64


class AdapterRoom(Protocol):
    """What the scheduler asks of the adapter cache."""

    def admit(self, lease: Any) -> bool:
        """Make the adapter resident on the device and pin it; False when there is no room now."""
        ...

    def is_loaded(self, lease: Any) -> bool:
        """Whether an admitted adapter's bytes have arrived on the device."""
        ...

    def suspend(self, lease: Any) -> None:
        """Drop the device pin."""
        ...


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, start + count) of a sequence; `samples`: the next token is due after them. num_encoded:
    rows of its encoder that are run before."""

    sequence: Sequence
    start: int
    count: int
    samples: bool
    num_encoded: int = 0

    @property
    def num_rows(self) -> int:
        return self.num_encoded + self.count

    @property
    def in_context(self) -> bool:
        """Whether it computes prompt tokens (again, after a preemption) rather than decodes."""
        return self.start < self.sequence.num_prompt


@dataclass(frozen=True)
class Step:
    """One forward pass."""

    chunks: tuple[Chunk, ...]

    @property
    def num_context_tokens(self) -> int:
        return sum(chunk.num_rows for chunk in self.chunks if chunk.in_context or chunk.num_encoded)


@dataclass
class _Round:
    """The arithmetic of one scheduling round: how many token rows are left, and what was taken."""

    budget: int
    chunks: list[Chunk] = field(default_factory=list)

    def take(self, sequence: Sequence) -> None:
        """Schedule as much of a sequence as fits; its encoder's rows come first, all of them."""
        encoded = sequence.num_unencoded
        count = min(sequence.num_due, self.budget - encoded)
        left = sequence.num_due - count
        if 0 < left <= sequence.num_draft:  # a guess is verified in one step
            count -= sequence.num_draft + 1 - left
        if count > 0:
            samples = count == sequence.num_due
            self.chunks.append(Chunk(sequence, sequence.num_computed, count, samples, encoded))
            self.budget -= self.chunks[-1].num_rows

    def give_back(self, sequence: Sequence) -> None:
        self.budget += sum(chunk.num_rows for chunk in self.chunks if chunk.sequence is sequence)
        self.chunks = [chunk for chunk in self.chunks if chunk.sequence is not sequence]


class Scheduler:
    """First come, first served, with one exception: who waits only for adapter room may be overtaken by other
    adapters a bounded number of times, and by the base model, which takes no adapter room, at any time.

    guaranteed_no_evict: a sequence is admitted when its longest possible length fits, so it never stops.
    max_utilization: it is admitted when its present tokens fit; when room runs out, the one admitted last
    gives its blocks back and is computed again later.
    """

    def __init__(
        self,
        kv: KvCache,
        adapters: AdapterRoom,
        *,
        max_batch_size: int,
        max_num_tokens: int,
        reserve_all: bool,
        chunked: bool,
    ) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self.num_preemptions = 0
        self.num_tokens_reused = 0
        self._kv = kv
        self._adapters = adapters
        self._max_batch_size = max_batch_size
        self._max_num_tokens = max_num_tokens
        self._reserve_all = reserve_all
        self._whole = not chunked
        self._under_way: frozenset[Sequence] = frozenset()
        self._kept: list[Sequence] = []  # preempted, but a step under way reads their adapters

    @property
    def num_slots(self) -> int:
        """Rows of the batch that running sequences take when all decode."""
        return sum(sequence.num_slots for sequence in self.running)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self, under_way: Step | None = None) -> Step:
        """Decode tokens first, then prompts that are under way, then new sequences.

        Who waits for an adapter's bytes, or for its guide, is left out while others have work. under_way: a
        step that still runs, whose results count; no adapter gives way that it reads. It must have landed at
        the next call.
        """
        for victim in self._kept:
            self._adapters.suspend(victim.lease)
        self._kept = []
        self._under_way = frozenset(c.sequence for c in under_way.chunks) if under_way else frozenset()
        this = _Round(self._max_num_tokens)
        going = [sequence for sequence in self.running if not sequence.is_full]
        for sequence in sorted(going, key=lambda s: s.in_prefill):
            if sequence.is_waiting:
                continue
            if sequence.blocks and self._make_room(sequence, this) and self._is_loaded(sequence):
                this.take(sequence)
        self._admit(this)
        self._prefetch()
        if not this.chunks:
            for sequence in self.running:
                if sequence.blocks and not sequence.is_full:
                    this.take(sequence)
        return Step(tuple(this.chunks))

    def advance(self, step: Step) -> None:
        """The step was computed, and its tokens appended: count it, and offer its full blocks for reuse.

        With tokens that are foreseen it may still be under way: what reads its blocks is queued behind it.
        """
        for chunk in step.chunks:
            sequence = chunk.sequence
            if not sequence.blocks:  # removed while the step ran
                continue
            # The token that was just appended is not computed yet, nor is what was wrong in a guess.
            limit = len(sequence.tokens) - (sequence.beams is None)
            sequence.num_computed = min(sequence.num_computed + chunk.count, limit)
            self._kv.commit(sequence)

    def fork(self, leader: Sequence, beams: list[Sequence]) -> None:
        """Let the beams of a search run beside the sequence that computed their prompt."""
        at = self.running.index(leader) + 1
        self.running[at:at] = beams

    def remove(self, sequences: Iterable[Sequence]) -> None:
        """Forget sequences, wherever they are, and free their blocks. Their leases are the caller's."""
        gone = set(sequences)
        for sequence in gone:
            self._kv.free(sequence)
        self.running = [s for s in self.running if s not in gone]
        if any(s in gone for s in self.waiting):
            self.waiting = deque(s for s in self.waiting if s not in gone)

    def _make_room(self, sequence: Sequence, this: _Round) -> bool:
        """Blocks for what the sequence may compute now, taken from the one admitted last if need be."""
        if sequence.beams is not None:  # has all it may need
            return True
        target = sequence.num_computed + min(sequence.num_due, this.budget)
        while not self._kv.grow(sequence, target):
            victim = next(s for s in reversed(self.running) if s.beams is None)
            self._preempt(victim, this)
            if victim is sequence:
                return False
        return True

    def _preempt(self, victim: Sequence, this: _Round) -> None:
        this.give_back(victim)
        self.running.remove(victim)
        self._kv.free(victim)
        if victim.lease and victim in self._under_way:
            self._kept.append(victim)
        elif victim.lease:
            self._adapters.suspend(victim.lease)
        self.waiting.appendleft(victim)
        self.num_preemptions += 1

    def _admit(self, this: _Round) -> None:
        """Oldest first. Who finds no adapter room is passed by, but not by other adapters for ever."""
        passed: list[Sequence] = []
        no_room: set[str] = set()
        held = False
        while self.waiting and this.budget > 0:
            if self.num_slots + self.waiting[0].num_slots > self._max_batch_size:
                break
            if self.waiting[0] in self._kept:
                break
            sequence = self.waiting.popleft()
            if sequence.lease and (held or not self._try_adapter(sequence, no_room)):
                passed.append(sequence)
                held = held or sequence.num_overtaken >= MAX_OVERTAKES
                continue
            if not self._try_blocks(sequence, this):
                if sequence.lease:
                    self._adapters.suspend(sequence.lease)
                self.waiting.appendleft(sequence)
                break
            self.running.append(sequence)
            sequence.first_scheduled_ns = sequence.first_scheduled_ns or time.monotonic_ns()
            self.num_tokens_reused += sequence.num_computed
            if self._is_loaded(sequence):
                this.take(sequence)
            if sequence.lease:
                for earlier in passed:
                    earlier.num_overtaken += 1
        self.waiting.extendleft(reversed(passed))

    def _prefetch(self) -> None:
        """Begin the copies of adapters for those who are next. Each once, so that what was brought and had to
        give way again is not brought again and again."""
        for sequence in islice(self.waiting, MOST_PREFETCHED):
            if sequence in self._kept:
                continue
            if sequence.lease and sequence.lease.carried is None and not sequence.is_prefetched:
                if not self._adapters.admit(sequence.lease):
                    return
                self._adapters.suspend(sequence.lease)
                sequence.is_prefetched = True

    def _is_loaded(self, sequence: Sequence) -> bool:
        return sequence.lease is None or self._adapters.is_loaded(sequence.lease)

    def _try_adapter(self, sequence: Sequence, no_room: set[str]) -> bool:
        if sequence.root in no_room:
            return False
        if self._adapters.admit(sequence.lease):
            return True
        no_room.add(sequence.root)
        return False

    def _try_blocks(self, sequence: Sequence, this: _Round) -> bool:
        least = sequence.num_due if self._whole else 1
        if this.chunks and sequence.num_unencoded + least > this.budget:
            return False
        everything = self._reserve_all or sequence.beams is not None
        wanted = sequence.max_len if everything else min(len(sequence.tokens) + 1, sequence.max_len)
        if not self._kv.begin(sequence, wanted):
            return False
        if sequence.beams is not None and not self._kv.reserve_beams(sequence):
            self._kv.free(sequence)
            return False
        return True
