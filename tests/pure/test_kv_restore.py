"""Protects how sequences wait for KV blocks that are copied back: the others do not, and nothing leaks."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from manylora.config.engine import EngineConfig
from manylora.engine.kv_cache import KvCache
from manylora.engine.scheduler import Scheduler, Step
from manylora.engine.sequence import Sequence
from manylora.request import Request, SamplingConfig

SIZE = 4
LONG = list(range(161))


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
    def __init__(self, known: int, blocks: int = 200, **options: Any) -> None:
        self.store: Any = Store(known)
        self.kv = KvCache(blocks, SIZE, store=self.store)
        config = EngineConfig(Path(), max_batch_size=8, max_num_tokens=512, **options)
        self.scheduler = Scheduler(self.kv, None, config)  # type: ignore[arg-type]
        self.live: list[Sequence] = []

    def add(self, prompt: list[int], new: int = 3) -> Sequence:
        made = Sequence(0, Request(tuple(prompt), SamplingConfig(max_tokens=new)), 0, len(prompt) + new)
        self.live.append(made)
        self.scheduler.waiting.append(made)
        return made

    def step(self) -> Step:
        step = self.scheduler.schedule()
        for chunk in step.chunks:
            if chunk.samples:
                chunk.sequence.append(7, None)
        self.scheduler.advance(step)
        ended = [one for one in self.live if one.finished]
        self.scheduler.remove(ended)
        self.live = [one for one in self.live if not one.finished]
        self.kv.check(self.live)
        return step


def test_a_sequence_waits_for_its_blocks_and_others_do_not() -> None:
    bench = Bench(40)
    first, alike, short = bench.add(LONG), bench.add([*LONG, 1, 2, 3]), bench.add([9, 9, 9])
    for _ in range(2):
        assert [chunk.sequence for chunk in bench.step().chunks] == [short]
    [filled] = bench.store.started  # the second one waits for the same blocks
    filled.set_result(40)
    chunks = {chunk.sequence: chunk for chunk in bench.step().chunks}
    assert (chunks[first].start, chunks[first].count) == (160, 1)
    assert (chunks[alike].start, chunks[alike].count) == (160, 4)
    assert first.kv.num_reused == 40 and bench.scheduler.num_tokens_reused == 320
    while bench.live:
        bench.step()
    assert len(bench.store.started) == 1


@pytest.mark.parametrize("found", [0, 7])
def test_blocks_that_are_absent_after_all_are_computed_and_kept(found: int) -> None:
    bench = Bench(40)
    one = bench.add(LONG)
    assert not bench.step().chunks
    bench.store.started[0].set_result(found)
    bench.store.known = found
    assert bench.step().chunks[0].start == found * SIZE
    while bench.live:
        bench.step()
    assert one.finished and not bench.kv.save_blocks(100)
    assert bench.store.saved == [*range(40, found, -1)], (
        "the last block is the first to be evicted there, too"
    )


def test_blocks_of_a_sequence_that_is_gone_are_free_only_when_nobody_writes_to_them() -> None:
    bench = Bench(40, blocks=45)
    gone = bench.add(LONG)
    bench.step()
    bench.scheduler.remove([gone])
    bench.live.clear()
    bench.kv.check([])
    assert bench.kv.num_available == 5
    next_one = bench.add([5] * 100)
    assert not bench.step().chunks and next_one in bench.scheduler.waiting
    bench.store.known = 0
    bench.store.started[0].set_result(40)
    assert [chunk.sequence for chunk in bench.step().chunks] == [next_one]
    assert gone.num_computed == 0


def test_a_disk_that_hangs_holds_up_nobody_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(40)
    one = bench.add(LONG)
    assert not bench.step().chunks
    monkeypatch.setattr("manylora.engine.kv_cache.STUCK_S", 0)
    assert [chunk.sequence for chunk in bench.step().chunks] == [one]
    assert one.num_computed == len(LONG)
    while bench.live:
        bench.step()
    bench.store.started[0].set_result(40)
    bench.scheduler.schedule()
    bench.kv.check([])
    assert bench.kv.num_available == 200


def test_evicted_blocks_are_kept() -> None:
    bench = Bench(0, blocks=45)
    for prompt in (LONG, [5] * 161):
        bench.add(prompt)
        while bench.live:
            bench.step()
    assert sorted(bench.store.saved) == [*range(5, 41)], "as many as the second one needs"
