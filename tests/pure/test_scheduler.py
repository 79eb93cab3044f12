"""Protects the scheduler and the KV blocks: nothing leaks, nobody starves, budgets hold, reuse is exact; and
sequences that wait for blocks to be copied back keep nobody else waiting."""

from __future__ import annotations

import random
from collections.abc import Sequence as Rows
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from manylora.config.engine import EngineConfig
from manylora.engine.kv_cache import KvCache
from manylora.engine.scheduler import MAX_OVERTAKES, Scheduler
from manylora.engine.sequence import Sequence
from manylora.request import Request, SamplingConfig

SIZE = 4  # tokens of a block
LONG = list(range(161))


@dataclass(eq=False)
class FakeLease:
    digest: str
    invocation: tuple[int, ...] = ()
    carried: object = None


@dataclass
class FakeAdapters:
    """Room for `capacity` distinct adapters at a time."""

    capacity: int = 2
    pins: dict[str, int] = field(default_factory=dict)
    loading: set[str] = field(default_factory=set)  # admitted, but their bytes have not arrived
    brought: list[str] = field(default_factory=list)

    def admit(self, lease: FakeLease) -> bool:
        if lease.digest not in self.pins and len(self.pins) == self.capacity:
            return False
        self.brought.append(lease.digest)
        self.pins[lease.digest] = self.pins.get(lease.digest, 0) + 1
        return True

    def is_loaded(self, lease: FakeLease) -> bool:
        return lease.digest not in self.loading

    def suspend(self, lease: FakeLease) -> None:
        self.pins[lease.digest] -= 1
        if not self.pins[lease.digest]:
            del self.pins[lease.digest]


class Store:
    """Has the first `known` blocks of any prompt; the test says when they are there."""

    is_ready = True

    def __init__(self, known: int) -> None:
        self.known, self.saved = known, list[int]()
        self.started: list[Future[int]] = []

    def key(self, parent: tuple | None, root: str, adapter: str, tokens: Rows[int]) -> tuple:
        return *(parent or ()), (root, adapter, *tokens)

    def has(self, key: tuple) -> bool:
        return len(key) <= self.known

    is_saved = has

    def restore(self, keys: Rows[tuple], blocks: Rows[int]) -> Future[int]:
        self.started.append(Future())
        return self.started[-1]

    def save(self, key: tuple, block: int, priority: int, duration_ms: int | None) -> None:
        self.saved.append(len(key))


class Bench:
    """A scheduler whose steps are 'computed' by appending token 7. store: of the KV blocks, on disk."""

    def __init__(self, blocks: int = 64, adapters: int = 2, store: Any = None, **options: object) -> None:
        settings = {"max_batch_size": 8, "max_num_tokens": 32} | options
        self.store, self.kv = store, KvCache(blocks, SIZE, store=store)
        self.adapters = FakeAdapters(adapters)
        self.scheduler = Scheduler(self.kv, self.adapters, EngineConfig(Path(), **settings))  # type: ignore[arg-type]
        self.live: list[Sequence] = []
        self.done: list[Sequence] = []

    def add(
        self, prompt: list[int], new: int, adapter: str | None = None, invocation: tuple[int, ...] = ()
    ) -> Sequence:
        lease = FakeLease(adapter, invocation) if adapter else None
        request = Request(tuple(prompt), SamplingConfig(max_tokens=new))
        sequence = Sequence(0, request, 0, len(prompt) + new, lease)
        self.live.append(sequence)
        self.scheduler.waiting.append(sequence)
        return sequence

    def step(self) -> list[tuple[Sequence, int, int]]:
        step = self.scheduler.schedule()
        for chunk in step.chunks:
            if chunk.samples:
                chunk.sequence.append(7, None)
        self.scheduler.advance(step)
        ended = [s for s in self.live if s.finished]
        self.scheduler.remove(ended)
        for sequence in ended:
            if sequence.lease:
                self.adapters.suspend(sequence.lease)  # type: ignore[arg-type]
        self.done += ended
        self.live = [s for s in self.live if not s.finished]
        self.kv.check(self.live)
        return [(c.sequence, c.start, c.count) for c in step.chunks]


@pytest.mark.parametrize("company", [0, 1, 3, 7])
def test_prompts_are_divided_at_the_same_borders_in_any_company(company: int) -> None:
    bench = Bench(max_num_tokens=39)  # with room for 32 beside 7 that decode
    for number in range(company):
        bench.add([number] * (1 + number), 30)
    bench.step()
    long, ends = bench.add(list(range(100)), 1), []
    while long in bench.live:
        ends += [start + count for sequence, start, count in bench.step() if sequence is long]
    assert ends[-1] == 100 and not any(end % 32 for end in ends[:-1])


def test_without_chunking_a_prompt_waits_until_it_fits_whole() -> None:
    bench = Bench(max_num_tokens=10, enable_chunked_context=False)
    bench.add([1] * 6, 5)
    waits = bench.add([2] * 9, 5)
    assert [n for _, _, n in bench.step()] == [6]
    assert [n for _, _, n in bench.step()] == [1, 9]
    assert waits.num_computed == 9


CHAIN = [
    # adapter, whether it is activated by 90 91, prompt, tokens reused
    (None, False, [*range(10)], 0),
    (None, False, [*range(10)], 8),
    ("b", False, [*range(10)], 0),
    ("a", True, [*range(10), 90, 91, 1], 8),  # what the base model made; acts from 10 on
    ("b", True, [*range(10), 90, 91, 1], 8),
    ("a", True, [*range(10), 90, 91, 1], 12),  # of its own
    (None, False, [*range(10), 90, 91, 1], 8),  # not what an adapter made
    ("a", False, [*range(10), 90, 91, 1], 0),  # a plain LoRA of the same digest acts everywhere
    ("a", True, [*range(8), 90, 91, 8, 9, 10], 8),  # where it begins at the border of a block,
    ("a", True, [*range(8), 90, 91, 8, 9, 10], 12),
    ("c", True, [*range(9), 90, 91], 8),
    ("c", True, [*range(9), 90, 91, 5, 6, 90, 91], 8),  # its last one counts: 9 to 12 were not the base's
    (None, False, [*range(9), 90, 91, 5, 6, 90, 91], 12),  # but are now
    ("d", True, [*range(10), 90, 90, 4, 5, 6], 8),  # never acts: the base model's
    ("d", True, [90, 91, *range(10)], 0),  # acts from the start
]


def test_what_is_before_an_invocation_is_the_base_models() -> None:
    bench = Bench()
    for number, (adapter, activated, prompt, reused) in enumerate(CHAIN):
        bench.add(prompt, 1, adapter, (90, 91) if activated else ())
        [(_, start, _)] = bench.step()
        assert start == reused, number


def test_who_waits_for_adapter_room_is_overtaken_but_not_for_ever() -> None:
    bench = Bench(adapters=1, blocks=512, max_batch_size=4)
    bench.add([1], 3, "hot")
    bench.step()
    cold = bench.add([1], 1, "cold")
    overtaken = 0
    while not cold.finished:
        bench.add([1], 3, "hot")
        bench.add([1], 1)
        bench.step()
        overtaken += 1
        assert overtaken < 3 * MAX_OVERTAKES, "the cold adapter starves"
    assert cold.num_overtaken >= MAX_OVERTAKES
    base = [s for s in bench.done if s.lease is None]
    assert len(base) > MAX_OVERTAKES, "the base model was held up by adapters"


def test_max_utilization_preempts_the_last_admitted_and_recomputes_it() -> None:
    bench = Bench(blocks=6, batch_scheduler_policy="max_utilization")
    first, second = bench.add([1] * 8, 12, "a"), bench.add([2] * 8, 12, "b")
    while bench.live:
        bench.step()
    assert bench.scheduler.num_preemptions > 0
    assert [first.num_output, second.num_output] == [12, 12]
    assert bench.done[0] is first
    assert bench.adapters.pins == {}


@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
@pytest.mark.parametrize("chunked", [True, False])
def test_random_traffic_ends_and_adds_up(policy: str, chunked: bool) -> None:
    random.seed(1)
    options = {"batch_scheduler_policy": policy, "enable_chunked_context": chunked}
    bench = Bench(blocks=24, max_batch_size=6, max_num_tokens=24, **options)
    for _ in range(800):
        if random.random() < 0.3:
            adapter = random.choice([None, "a", "b", "c", "d"])
            start = random.randint(0, 3)
            bench.add(list(range(start, start + random.randint(1, 22))), random.randint(1, 20), adapter)
        if bench.live and random.random() < 0.05:
            victim = random.choice(bench.live)
            running = victim in bench.scheduler.running
            bench.scheduler.remove([victim])
            bench.live.remove(victim)
            if victim.lease and running:
                bench.adapters.suspend(victim.lease)  # type: ignore[arg-type]
        chunks = bench.step()
        assert sum(n for _, _, n in chunks) <= 24
        assert len(chunks) <= 6
    for _ in range(5000):
        if not bench.live:
            break
        bench.step()
    assert not bench.live
    assert bench.kv.num_available == 24
    assert bench.adapters.pins == {}


def test_who_waits_for_an_adapters_bytes_keeps_nobody_waiting() -> None:
    bench = Bench()
    busy = bench.add([1, 2, 3], 8)
    bench.step()
    late = bench.add([4, 5], 3, "a")
    bench.adapters.loading.add("a")
    for _ in range(2):
        assert {sequence for sequence, *_ in bench.step()} == {busy}
    bench.adapters.loading.clear()
    assert {sequence for sequence, *_ in bench.step()} == {busy, late}
    while bench.live:
        bench.step()
    alone = bench.add([6], 2, "b")
    bench.adapters.loading.add("b")
    # Nothing else is there to do: the device waits, and the loop need not spin.
    assert {sequence for sequence, *_ in bench.step()} == {alone}


def test_adapters_of_those_who_are_next_are_brought_while_they_wait() -> None:
    bench = Bench(adapters=3, max_batch_size=1)
    running = bench.add([1, 2], 9, "a")
    for name in ("b", "c", "d"):
        bench.add([1, 2], 1, name)
    missing = bench.add([1, 2], 1, "e")
    assert isinstance(missing.lease, FakeLease)
    missing.lease.carried = object()
    bench.step()
    bench.step()
    assert bench.adapters.brought == ["a", "b", "c", "d"], "each once, in order; none that is not on the host"
    assert set(bench.adapters.pins) == {"a"}, "who waits holds nothing"
    while not running.finished:
        bench.step()
    bench.step()
    assert bench.adapters.brought[4:] == ["b"]


def test_no_adapter_gives_way_that_a_step_under_way_reads() -> None:
    """Room for keys and values runs out while the step before still runs: who must wait keeps its adapter
    until that has landed, and is not admitted again before."""
    bench = Bench(blocks=4, adapters=2, batch_scheduler_policy="max_utilization")
    older, younger = bench.add([1, 2, 3, 4], 9, "a"), bench.add([5, 6, 7, 8], 9, "b")
    third = bench.add([9], 1, "c")
    bench.step()
    for _ in range(3):
        step = bench.scheduler.schedule()
        for chunk in step.chunks:
            chunk.sequence.append(7, None)
        bench.scheduler.advance(step)
    step = bench.scheduler.schedule()
    assert {chunk.sequence for chunk in step.chunks} == {older, younger}
    for chunk in step.chunks:
        chunk.sequence.append_pending_token()
    bench.scheduler.advance(step)
    after = bench.scheduler.schedule(step)
    assert [chunk.sequence for chunk in after.chunks] == [older]
    assert list(bench.scheduler.waiting) == [younger, third] and bench.scheduler.num_preemptions == 1
    assert bench.adapters.pins == {"a": 1, "b": 1}
    for sequence in (older, younger):
        sequence.remove_pending_token()
        sequence.append(7, None)
    bench.scheduler.schedule()
    assert bench.adapters.pins == {"a": 1}


PREFIX = list(range(100, 100 + 600))


def beginners(bench: Bench, count: int) -> list[Sequence]:
    """Activated adapters behind one prompt."""
    return [bench.add([*PREFIX, 3, 4, number], 2, f"a{number}", (3, 4)) for number in range(count)]


def test_one_computes_a_beginning_and_the_others_wait_for_it() -> None:
    bench = Bench(blocks=800, adapters=12, max_batch_size=16, max_num_tokens=4096)
    first, *others = beginners(bench, 10)
    other = bench.add([*PREFIX[:64], *range(600)], 2)
    assert [(s, n) for s, _, n in bench.step()] == [(first, 603), (other, 664)], "an unlike prompt waited"
    assert [(s, start) for s, start, _ in bench.step()][2:] == [(s, 600) for s in others]
    assert bench.kv.num_blocks - bench.kv.num_available < 150 + 10 * 2 + 170


def test_nobody_waits_for_one_that_does_not_move() -> None:
    for reason in ("removed", "loading", "preempted"):
        bench = Bench(blocks=800, adapters=12, max_batch_size=16, max_num_tokens=512)
        first, second, third = beginners(bench, 3)
        assert [s for s, *_ in bench.step()] == [first]
        if reason == "removed":
            bench.scheduler.remove([first])
            bench.live.remove(first)
        elif reason == "loading":
            bench.adapters.loading.add("a0")
        else:
            bench.scheduler.running.remove(first)
            bench.kv.free(first)
            bench.live.remove(first)
        found = bench.step()
        # What the first one left in the cache is used; what remains is less than a wait is for.
        assert {s for s, *_ in found} == {second, third} and all(start == 512 for _, start, _ in found), (
            reason
        )


def test_a_beginning_is_waited_for_chunk_by_chunk_and_only_by_those_that_can_use_it() -> None:
    bench = Bench(blocks=2000, adapters=12, max_batch_size=16, max_num_tokens=256)
    base = bench.add(PREFIX, 2)
    late = bench.add([*PREFIX, 9], 2)
    assert [(s, n) for s, _, n in bench.step()] == [(base, 256)]
    assert [(s, n) for s, _, n in bench.step()] == [(base, 256)]
    found = bench.step()  # 88 tokens are left: less than a wait is for
    assert [(s, start) for s, start, _ in found] == [(base, 512), (late, 512)]
    bench = Bench(blocks=2000, adapters=12, max_batch_size=16, max_num_tokens=4096)
    base, plain = bench.add(PREFIX, 2), bench.add(PREFIX, 2, "p")
    again, whole = bench.add(PREFIX, 2, "p"), bench.add(PREFIX, 2)
    params = replace(whole.request.params, return_context_logits=True)
    whole.request = replace(whole.request, params=params)
    assert [s for s, *_ in bench.step()] == [base, plain, whole]
    assert again in [s for s, *_ in bench.step()]


def restoring(known: int, blocks: int = 200) -> Bench:
    """So many blocks of any prompt are on disk."""
    return Bench(blocks, store=Store(known), max_num_tokens=512)


def test_a_sequence_waits_for_its_blocks_and_others_do_not() -> None:
    bench = restoring(40)
    first, alike, short = bench.add(LONG, 3), bench.add([*LONG, 1, 2, 3], 3), bench.add([9, 9, 9], 3)
    for _ in range(2):
        assert [one for one, *_ in bench.step()] == [short]
    [filled] = bench.store.started  # the second one waits for the same blocks
    filled.set_result(40)
    assert {(first, 160, 1), (alike, 160, 4)} <= set(bench.step())
    assert first.kv.num_reused == 40 and bench.scheduler.num_tokens_reused == 320
    while bench.live:
        bench.step()
    assert len(bench.store.started) == 1


@pytest.mark.parametrize("found", [0, 7])
def test_blocks_that_are_absent_after_all_are_computed_and_kept(found: int) -> None:
    bench = restoring(40)
    one = bench.add(LONG, 3)
    assert not bench.step()
    bench.store.started[0].set_result(found)
    bench.store.known = found
    assert bench.step()[0][1] == found * SIZE
    while bench.live:
        bench.step()
    assert one.finished and not bench.kv.save_blocks(100)
    assert bench.store.saved == [*range(40, found, -1)], (
        "the last block is the first to be evicted there, too"
    )


def test_blocks_of_a_sequence_that_is_gone_are_free_only_when_nobody_writes_to_them() -> None:
    bench = restoring(40, 45)
    gone = bench.add(LONG, 3)
    bench.step()
    bench.scheduler.remove([gone])
    bench.live.clear()
    bench.kv.check([])
    assert bench.kv.num_available == 5
    next_one = bench.add([5] * 100, 3)
    assert not bench.step() and next_one in bench.scheduler.waiting
    bench.store.known = 0
    bench.store.started[0].set_result(40)
    assert [one for one, *_ in bench.step()] == [next_one]
    assert gone.num_computed == 0


def test_a_disk_that_hangs_holds_up_nobody_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = restoring(40)
    one = bench.add(LONG, 3)
    assert not bench.step()
    monkeypatch.setattr("manylora.engine.kv_cache.STUCK_S", 0)
    assert [one for one, *_ in bench.step()] == [one]
    assert one.num_computed == len(LONG)
    while bench.live:
        bench.step()
    bench.store.started[0].set_result(40)
    bench.scheduler.schedule()
    bench.kv.check([])
    assert bench.kv.num_available == 200


def test_evicted_blocks_are_kept() -> None:
    bench = restoring(0, 45)
    for prompt in (LONG, [5] * 161):
        bench.add(prompt, 3)
        while bench.live:
            bench.step()
    assert sorted(bench.store.saved) == [*range(5, 41)], "as many as the second one needs"
