"""Scheduler: decides which tokens of which sequences the next step computes. Pure Python over counters."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from manylora.config.engine import EngineConfig
from manylora.engine.kv_cache import KvCache
from manylora.engine.sequence import Restore, Sequence
from manylora.engine.speculation import Speculation

if TYPE_CHECKING:
    from manylora.adapters.cache.leases import Lease
    from manylora.adapters.cache.store import AdapterStore

MIN_SHARED = 128  # tokens that a sequence waits for; fewer are computed in less time than a step takes
RESTORE_S = 0.005  # how long a step without other work waits for blocks that are copied back
MAX_PREFETCHED = 8  # waiting sequences whose adapters are copied to the device ahead of time
# A sequence that waits for space in the adapter cache lets this many later ones pass before it blocks them.
MAX_OVERTAKES = 64


@dataclass(slots=True)  # not frozen, which takes longer to make: there is one for each row that decodes
class Chunk:
    """Tokens [start, start + count) of a sequence."""

    sequence: Sequence
    start: int
    count: int
    samples: bool  # whether the next token is sampled after them
    num_encoded: int = 0  # encoder rows to compute first
    ends: bool = False  # whether they end the prompt of a request for pooled outputs

    @property
    def num_rows(self) -> int:
        return self.num_encoded + self.count

    @property
    def in_context(self) -> bool:
        """Whether it computes prompt tokens, possibly again after a preemption, rather than decodes."""
        return self.start < self.sequence.num_prompt


@dataclass(frozen=True)
class Step:
    """One forward pass."""

    chunks: tuple[Chunk, ...]
    run: DecodeRun | None = None  # if each chunk decodes one token, and later steps probably repeat this

    @property
    def num_context_tokens(self) -> int:
        if self.run is not None:
            return 0
        return sum(chunk.num_rows for chunk in self.chunks if chunk.in_context or chunk.num_encoded)


class DecodeRun:
    """Consecutive steps in which the same S sequences decode one token each. What stays the same from one
    step to the next is kept here.

    sequences: in the order of their rows; those of one adapter are adjacent.
    positions: [S] int64, of the token that each computes next; a new array after each step.
    num_left: steps until one of them requires another kind of step.
    can_run_ahead: as in `Sequence`, for all of them.
    """

    def __init__(self, sequences: Iterable[Sequence], tokens_per_block: int) -> None:
        self.sequences = tuple(
            sorted(sequences, key=lambda s: s.batch_key(s.num_computed, s.num_computed + 1))
        )
        self.positions = np.array([sequence.num_computed for sequence in self.sequences])
        self.can_run_ahead = all(sequence.can_run_ahead for sequence in self.sequences)
        self.num_left = min(map(_steps_left, self.sequences))
        self._size = tokens_per_block
        self.blocks_added()

    def blocks_added(self) -> None:
        """Call this after sequences got more blocks."""
        self._rooms = np.array([len(sequence.kv.blocks) * self._size for sequence in self.sequences])
        self._num_fit = int((self._rooms - self.positions).min())  # steps for which all sequences have blocks

    def without_room(self) -> list[Sequence]:
        """Sequences whose blocks have no space for the token that they compute next."""
        if self._num_fit > 0:
            return []
        return [self.sequences[row] for row in np.flatnonzero(self.positions >= self._rooms)]

    def step_done(self) -> None:
        self.positions = self.positions + 1
        self.num_left -= 1
        self._num_fit -= 1


def _steps_left(sequence: Sequence) -> int:
    """Steps until its last token, its rotary scaling or its next draft."""
    last, limit = sequence.max_len - 1, sequence.rope_limit
    if limit is not None and sequence.rope_length <= limit:
        last = min(last, limit)
    if sequence.drafter is not None:
        last = min(last, sequence.drafter.wakes_at - 1)
    return last - sequence.num_computed


@dataclass
class _Round:
    """One call of `Scheduler.schedule`. budget: rows left. border: see `EngineConfig.chunk_tokens`."""

    budget: int
    border: int
    chunks: list[Chunk] = field(default_factory=list)
    restored: list[Chunk] = field(default_factory=list)  # not computed, but copied back

    def add(self, sequence: Sequence) -> None:
        """Schedule as much of a sequence as fits. All rows of its encoder come first."""
        if self.budget and sequence.is_decoding:
            self.chunks.append(Chunk(sequence, sequence.num_computed, 1, True))
            self.budget -= 1
            return
        encoded = sequence.num_unencoded
        count = min(sequence.num_due, self.budget - encoded)
        left = sequence.num_due - count
        if 0 < left <= sequence.num_draft:  # draft tokens are verified in one step
            count -= sequence.num_draft + 1 - left
        if 0 < count < sequence.num_due:
            whole = count - (sequence.num_computed + count) % self.border
            count = whole if whole > 0 or self.chunks else count  # alone it must make progress
        if count > 0:
            ends, pooled = count == sequence.num_due, sequence.request.pooling is not None
            chunk = Chunk(sequence, sequence.num_computed, count, ends and not pooled, encoded)
            chunk.ends = ends and pooled
            self.chunks.append(chunk)
            self.budget -= chunk.num_rows

    @property
    def long_chunks(self) -> list[Chunk]:
        """Chunks that other sequences may wait for."""
        return [chunk for chunk in (*self.chunks, *self.restored) if chunk.count >= MIN_SHARED]

    @property
    def only_decodes(self) -> bool:
        """Whether each sequence decodes one token now, and in its later steps, too."""
        return all(
            one.is_decoding
            and one.guide is None
            and one.beams is None
            and not one.drafts
            and max(one.num_prompt + 1, one.rope_length) <= one.num_computed + 1
            for one in (chunk.sequence for chunk in self.chunks)
        )

    def remove(self, sequence: Sequence) -> None:
        self.budget += sum(chunk.num_rows for chunk in self.chunks if chunk.sequence is sequence)
        self.chunks = [chunk for chunk in self.chunks if chunk.sequence is not sequence]


class Scheduler:
    """First come, first served, with one exception: a sequence that waits only for space in the adapter cache
    may be overtaken, by other adapters MAX_OVERTAKES times, by the base model at any time.

    guaranteed_no_evict: a sequence is admitted when its longest possible length fits, so it is never
    preempted. max_utilization: it is admitted when its present tokens fit; when blocks run out, the sequence
    admitted last gives its blocks back and is computed again later. Under both policies, a sequence that
    outgrows its rotary scaling is computed again.
    """

    def __init__(self, kv: KvCache, adapters: AdapterStore, config: EngineConfig) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self.num_preemptions = 0
        self.num_tokens_reused = 0
        self.speculation = Speculation(config)
        self._kv = kv
        self._adapters = adapters
        self._config = config
        self._reserve_all = config.batch_scheduler_policy == "guaranteed_no_evict"
        self._run: DecodeRun | None = None  # of the step before, while the running sequences are the same
        self._in_flight = Step(())
        self._still_pinned: dict[Sequence, Lease] = {}  # preempted, but in flight: adapters are in use

    @property
    def num_slots(self) -> int:
        """Batch slots that the running sequences take when all of them decode."""
        return sum(sequence.num_slots for sequence in self.running)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self, in_flight: Step | None = None) -> Step:
        """Decode tokens first, then started prompts, then new sequences. One whose adapter or guide is not
        ready is left out while others have work. in_flight: a step without results yet; its adapters stay
        pinned.
        """
        for lease in self._still_pinned.values():
            self._adapters.suspend(lease)
        self._still_pinned = {}
        self._in_flight = in_flight or Step(())
        this = _Round(self._config.max_num_tokens, self._config.chunk_tokens)
        self.num_tokens_reused += self._kv.finish_restores()
        if self._kv.is_stuck:
            for restore in self._kv.restoring:
                self._preempt(restore.sequence, this)
        this.restored = [self._restored(one) for one in self._kv.restoring]
        run = self._run
        if run is None or not self._repeat(run, this):
            self._run = None
            self._schedule_running(this)
        self._admit(this)
        self._prefetch()
        if not this.chunks:  # nobody is ready: wait for an adapter or a guide within the step
            if this.restored and in_flight is None:
                self._kv.wait_for_restore(RESTORE_S)
            for sequence in [one for one in self.running if one.kv.blocks and one.kv.restore is None]:
                if not sequence.is_full and not self._lets_pass(sequence, this):
                    this.add(sequence)
        elif self._run is None and len(this.chunks) == len(self.running) and this.only_decodes:
            self._run = run = DecodeRun(self.running, self._kv.tokens_per_block)
            chunk_of = {chunk.sequence: chunk for chunk in this.chunks}
            this.chunks = [chunk_of[sequence] for sequence in run.sequences]
        states = self._kv.states
        if states is not None and self._run is None:
            for chunk in this.chunks:
                states.before_step(chunk.sequence, chunk.start, chunk.count)
        return Step(tuple(this.chunks), self._run)

    def _repeat(self, run: DecodeRun, this: _Round) -> bool:
        """Schedule the same sequences again. False: nothing is scheduled, one needs another step."""
        if run.num_left <= 0:
            return False
        if growing := run.without_room():
            for sequence in growing:
                if not self._ensure_blocks(sequence, this) or self._run is not run:  # one was preempted
                    return False
            run.blocks_added()
        chunks = zip(run.sequences, run.positions.tolist(), strict=True)
        this.chunks = [Chunk(sequence, start, 1, True) for sequence, start in chunks]
        this.budget -= len(this.chunks)
        return True

    def _schedule_running(self, this: _Round) -> None:
        for sequence in [s for s in self.running if s.rope_limit is not None and s.outgrows_rope]:
            self._preempt(sequence, this)
            sequence.extend_rope()
        unfinished = [sequence for sequence in self.running if not sequence.is_full]
        if self.speculation.is_on:
            self._draft(unfinished)
        for sequence in sorted(unfinished, key=lambda s: s.in_prefill):
            waits = sequence.guide is not None and sequence.guide.is_waiting
            ready = not waits and sequence.kv.blocks and self._ensure_blocks(sequence, this)
            if ready and self._is_loaded(sequence) and not self._lets_pass(sequence, this):
                this.add(sequence)

    def _lets_pass(self, sequence: Sequence, this: _Round) -> bool:
        """Whether a running sequence waits until this step has computed its beginning for another one. Only
        if its adapter arrived late, and nothing is computed. Otherwise it reuses what is in the cache by now.
        """
        begun = sequence.num_computed > sequence.kv.num_reused * self._kv.tokens_per_block
        if begun or sequence.beams is not None or not this.budget:
            return False
        if self._is_computed_by(this.long_chunks, sequence):
            return True
        before = sequence.num_computed
        self._kv.begin_again(sequence)
        self.num_tokens_reused += sequence.num_computed - before
        return sequence.kv.restore is not None

    def _is_computed_by(self, chunks: list[Chunk], sequence: Sequence) -> bool:
        """Whether one of these chunks computes MIN_SHARED tokens and half of the chunk for this sequence,
        too, which then waits for the next step. Only chunks of this step count: what waits for them makes
        progress.
        """
        for chunk in chunks:
            shared = self._kv.shared(sequence, chunk.sequence, chunk.start, chunk.count)
            if shared >= max(MIN_SHARED, chunk.count / 2):
                return True
        return False

    def _draft(self, sequences: list[Sequence]) -> None:
        """Add drafts to decoding sequences, as long as rows and blocks are left."""
        prompts = bool(self.waiting) or any(sequence.in_prefill for sequence in sequences)
        rows = self.speculation.num_rows(self.num_slots, prompts)
        price = self.speculation.times.price(len(sequences))
        for sequence in sequences:
            if sequence.drafter is None:
                continue
            sequence.take_back_draft()
            room = min(rows, sequence.draft_room)
            draft = sequence.drafter.propose(sequence.tokens, room, price) if room > 0 else []
            if draft and self._kv.grow(sequence, len(sequence.tokens) + len(draft)):
                sequence.add_draft(draft)
                rows -= len(draft)

    def advance(self, step: Step) -> None:
        """Count a step, whose tokens were appended, as computed, and register full blocks for reuse. With
        pending tokens it may be in flight: the device runs whatever reads its blocks after it.
        """
        size = self._kv.tokens_per_block
        for chunk in step.chunks:
            sequence = chunk.sequence
            kv, computed = sequence.kv, sequence.num_computed + chunk.count
            if not kv.blocks:  # removed while the step ran
                continue
            # The token just appended is not computed yet; of draft tokens, those rejected do not count.
            limit = len(sequence.tokens) - (sequence.beams is None and sequence.request.pooling is None)
            sequence.num_computed = computed if computed < limit else limit
            if computed >= (len(kv.nodes) + 1) * size:
                self._kv.commit(sequence)
            if self._kv.states is not None:
                self._kv.states.after_step(sequence)
        if step.run is not None:
            step.run.step_done()

    def fork(self, leader: Sequence, beams: list[Sequence]) -> None:
        """Let the beams of a search run, next to the sequence that computed their prompt."""
        self._run = None
        index = self.running.index(leader) + 1
        self.running[index:index] = beams

    def adapter_changed(self, sequence: Sequence) -> None:
        """A sequence that waits or runs has another lease."""
        self._run = None
        sequence.is_prefetched = False

    def remove(self, sequences: Iterable[Sequence]) -> None:
        """Remove sequences, waiting or running, and free their blocks. The caller releases their leases."""
        removed = set(sequences)
        if not removed:
            return
        self._run = None
        for sequence in removed:
            self._kv.free(sequence)
        self.running = [s for s in self.running if s not in removed]
        if any(s in removed for s in self.waiting):
            self.waiting = deque(s for s in self.waiting if s not in removed)

    def _ensure_blocks(self, sequence: Sequence, this: _Round) -> bool:
        """Blocks for the tokens it may compute now; sequences admitted later are preempted if needed."""
        if sequence.beams is not None:  # reserved at admission
            return True
        target = sequence.num_computed + min(sequence.num_due, this.budget)
        if target <= len(sequence.kv.blocks) * self._kv.tokens_per_block:
            return True
        while not self._kv.grow(sequence, target):
            victim = next(s for s in reversed(self.running) if s.beams is None)
            self._preempt(victim, this)
            if victim is sequence:
                return False
        return True

    def _preempt(self, victim: Sequence, this: _Round) -> None:
        self._run = None
        this.remove(victim)
        self.running.remove(victim)
        self._kv.free(victim)
        if victim.lease and any(chunk.sequence is victim for chunk in self._in_flight.chunks):
            self._still_pinned[victim] = victim.lease
        elif victim.lease:
            self._adapters.suspend(victim.lease)
        self.waiting.appendleft(victim)
        self.num_preemptions += 1

    def _admit(self, this: _Round) -> None:
        """Admit the oldest first. Skipped are sequences without space for their adapters, and those whose
        beginning this step computes for another one.
        """
        passed: list[Sequence] = []
        no_space: set[str] = set()  # digests of adapters
        blocked = False  # whether no other adapter may overtake
        computing = this.long_chunks
        while self.waiting and this.budget > 0:
            if self.num_slots + self.waiting[0].num_slots > self._config.max_batch_size:
                break
            if self.waiting[0] in self._still_pinned:
                break
            sequence = self.waiting.popleft()
            lease, times = sequence.lease, sequence.times
            if self._is_computed_by(computing, sequence):
                passed.append(sequence)
                continue
            if lease and (blocked or lease.digest in no_space or not self._adapters.admit(lease)):
                no_space.add(lease.digest)
                passed.append(sequence)
                blocked = blocked or sequence.num_overtaken >= MAX_OVERTAKES
                continue
            if not self._try_blocks(sequence, this):
                if lease:
                    self._adapters.suspend(lease)
                self.waiting.appendleft(sequence)
                break
            self._run = None
            self.running.append(sequence)
            times.first_scheduled_ns = times.first_scheduled_ns or time.monotonic_ns()
            self.num_tokens_reused += sequence.num_computed
            if sequence.kv.restore is not None:
                this.restored.append(self._restored(sequence.kv.restore))
            if self._is_loaded(sequence):
                this.add(sequence)
            computing = this.long_chunks
            if lease:
                for earlier in passed:
                    earlier.num_overtaken += 1
        self.waiting.extendleft(reversed(passed))

    def _prefetch(self) -> None:
        """Start to copy the adapters of the next waiting sequences to the device, once for each."""
        for sequence in islice(self.waiting, MAX_PREFETCHED):
            lease = sequence.lease
            if lease is None or sequence in self._still_pinned:
                continue
            if lease.carried is None and not sequence.is_prefetched:
                if not self._adapters.admit(lease):
                    return
                self._adapters.suspend(lease)
                sequence.is_prefetched = True

    def _is_loaded(self, sequence: Sequence) -> bool:
        """Whether its adapter and its first blocks are where they are computed with."""
        arrived = sequence.lease is None or self._adapters.is_loaded(sequence.lease)
        return arrived and sequence.kv.restore is None

    def _restored(self, restore: Restore) -> Chunk:
        count = len(restore.blocks) * self._kv.tokens_per_block
        return Chunk(restore.sequence, restore.sequence.num_computed, count, False)

    def _try_blocks(self, sequence: Sequence, this: _Round) -> bool:
        least = sequence.num_due
        if self._config.enable_chunked_context:
            least = min(least, this.border)
        if this.chunks and sequence.num_unencoded + least > this.budget:
            return False
        group = sequence.beams
        all_now = self._reserve_all or group is not None
        wanted = sequence.max_len if all_now else min(len(sequence.tokens) + 1, sequence.max_len)
        if not self._kv.begin(sequence, wanted):
            return False
        if group is not None and not self._kv.reserve_beams(group):
            self._kv.free(sequence)
            return False
        self._kv.restore(sequence)
        return True
