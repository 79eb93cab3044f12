"""Measures two engines on the same requests, in turn. One is idle while the other one runs."""

from __future__ import annotations

import statistics
import time
from datetime import datetime, timezone

from loads import OUTPUT, Case, prompts
from machine import Others, wait_for_quiet

from peers.process import Worker
from peers.rows import Row

PROMPT, MOST_S = 64, 40.0


def warm(ours: Worker, theirs: Worker, chosen: list[int | None]) -> None:
    """Run every adapter once, and two requests without an adapter."""
    short = prompts(len(chosen), 8, seed=3)
    for worker in (ours, theirs):
        worker.run(short, chosen, 4)
        worker.run(prompts(2, PROMPT, seed=9), [None] * 2, 2)


def measure(case: Case, ours: Worker, theirs: Worker, row: Row, rounds: int, wait: float) -> None:
    """Measure calls of `row.at_once` requests and fill in `row`. No round starts after MOST_S seconds, except
    the first. Adapters are used in turn, continuing from one call to the next."""
    row.date = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M")
    before = wait_for_quiet(wait)
    others, began = Others(), time.monotonic()
    calls = 2 if row.at_once == 1 else 1
    row.requests, row.tokens = calls * row.at_once, OUTPUT
    plan = [case.choose(10_000)[n * row.at_once :][: row.at_once] for n in range(rounds * calls)]
    same: list[bool] = []
    for turn in range(rounds):
        texts = [prompts(row.at_once, row.prompt, seed=20 + turn * calls + call) for call in range(calls)]
        chosen = plan[turn * calls : (turn + 1) * calls]
        order = (ours, theirs) if turn % 2 == 0 else (theirs, ours)
        found = {worker: _calls(worker, texts, chosen, OUTPUT) for worker in order}
        row.ours_s.append(found[ours][1])
        row.peer_s.append(found[theirs][1])
        same += [a[0] == b[0] for a, b in zip(found[ours][0], found[theirs][0], strict=True)]
        first = {
            worker: _calls(worker, [prompts(row.at_once, row.prompt, seed=99 + turn)], chosen[:1], 1)[1]
            for worker in order
        }
        row.ours_first_s.append(first[ours])
        row.peer_first_s.append(first[theirs])
        if time.monotonic() - began > MOST_S:
            break
    row.others = max(before, others.cpus())
    row.same_first = statistics.mean(same)
    row.ours_bytes, row.peer_bytes = vars(ours.resident()), vars(theirs.resident())


def _calls(
    worker: Worker, texts: list[list[list[int]]], chosen: list[list[int | None]], tokens: int
) -> tuple[list[list[int]], float]:
    """Run one call after the other. Returns all answers and the total seconds."""
    answers, total = [], 0.0
    for some, adapters in zip(texts, chosen, strict=True):
        answer, seconds = worker.run(some, adapters, tokens)
        answers += answer
        total += seconds
    return answers, total
