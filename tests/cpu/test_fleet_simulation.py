"""Protects what the fleet's simulation says: its servers compute what they are asked, loads are counted, the
bounds hold."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))  # scripts, not a package

from fleet_simulation import Fleet, arrivals, compare, fewest_loads, lines  # noqa: E402
from simulated_server import Arrival, Clock, Costs, Shape, SimulatedServer  # noqa: E402

COSTS = Costs(step_s=0.01, token_s=0.001, row_s=0.002, adapter_s=0.003, read_s=0.5, write_s=0.25)


def serve(shape: Shape, *requests: Arrival, costs: Costs = COSTS) -> SimulatedServer:
    clock = Clock()
    server = SimulatedServer("r", costs, shape, clock)
    for request in requests:
        clock.at(request.at, server.arrive, request)
    clock.run()
    server.store.cache.check()
    assert not server.scheduler.has_work and server.num_open == 0
    assert server.kv.num_available == server.kv.num_blocks
    return server


def test_times_are_the_sum_of_what_each_step_and_load_takes() -> None:
    base, cold = Arrival(0.0, None, 10, 3), Arrival(10.0, "a", 10, 1)
    warm = Arrival(20.0, "a", 10, 1)
    serve(Shape(2, 2), base, cold, warm)
    assert base.first_token == pytest.approx(0.01 + 10 * 0.001)
    assert base.end == pytest.approx(base.first_token + 2 * (0.01 + 0.002))
    step = 0.01 + 10 * 0.001 + 0.003
    assert cold.cold and cold.first_token - cold.at == pytest.approx(0.5 + 0.25 + step)
    assert not warm.cold and warm.first_token - warm.at == pytest.approx(step)


def test_a_cold_load_delays_no_other_request() -> None:
    steady = Arrival(0.0, None, 10, 200)
    alone = Arrival(0.0, None, 10, 200)
    serve(Shape(2, 2), alone)
    serve(Shape(2, 2), steady, Arrival(0.0, "a", 1, 1))
    assert steady.end == pytest.approx(alone.end, rel=0.02)


def test_a_step_goes_without_an_adapter_that_is_still_written_however_short_that_is() -> None:
    costs = replace(COSTS, read_s=0.005, write_s=1e-6)
    busy, cold = Arrival(0.0, None, 10, 9), Arrival(0.0, "a", 10, 1)
    serve(Shape(2, 2), busy, cold, costs=costs)
    assert busy.first_token == pytest.approx(0.01 + 10 * 0.001)
    # Read during the first step, and written at the start of the second.
    without = busy.first_token + 0.01 + 0.002
    assert cold.first_token == pytest.approx(without + 0.01 + 0.002 + 10 * 0.001 + 0.003)


def test_an_adapter_that_is_evicted_before_its_request_is_taken_is_read_again() -> None:
    held, other = Arrival(0.0, "a", 1, 1), Arrival(1.0, "b", 1, 1)
    long, late = Arrival(1.49, None, 1000, 1), Arrival(1.5, "a", 1, 1)  # "b" takes the only page when it ends
    server = serve(Shape(1, 1), held, other, long, late)
    assert late.cold and server.store.num_loads == 3


def test_what_does_not_fit_is_evicted_and_loaded_again() -> None:
    turns = [Arrival(2.0 * i, f"a{i % 3}", 4, 2) for i in range(12)]
    assert serve(Shape(2, 2), *turns).store.num_loads == 12  # LRU of two, three in turn
    again = [Arrival(2.0 * i, f"a{i % 3}", 4, 2) for i in range(12)]
    assert serve(Shape(2, 3), *again).store.num_loads == 3


def test_more_adapters_at_once_than_pages_wait_for_each_other() -> None:
    crowd = [Arrival(0.001 * i, f"a{i % 9}", 4, 5) for i in range(40)]
    server = serve(Shape(2, 2, max_batch_size=8), *crowd)
    assert all(one.end > one.first_token > one.at for one in crowd)
    assert server.store.num_loads >= 9


def test_no_order_of_eviction_loads_less_than_the_bound() -> None:
    names = ["a", "b", "c", "a", "b", None, "d", "a", "c"]
    best = 99
    for choices in product(range(3), repeat=len(names)):  # which of two is evicted, or the new one at once
        held, loads = list[str](), 0
        for name, choice in zip(names, choices, strict=True):
            if name is not None and name not in held:
                loads += 1
                held.append(name)
                held = [*held[:choice], *held[choice + 1 :]] if len(held) == 3 else held
        best = min(best, loads)
    assert sum(fewest_loads(names, 2)) == best


def test_arrivals_follow_their_rate_and_popularity() -> None:
    fleet = Fleet(replicas=4, adapters=50, rate=10.0, zipf=1.0, seconds=30.0, warm_s=0.0, base=0.2)
    found = list(arrivals(fleet))
    assert len(found) == pytest.approx(1200, rel=0.1)
    assert [one.at for one in found] == sorted(one.at for one in found)
    named = [one.adapter for one in found if one.adapter]
    assert len(named) == pytest.approx(0.8 * len(found), rel=0.1)
    counts = sorted((named.count(name) for name in set(named)), reverse=True)
    assert counts[0] == pytest.approx(2 * counts[1], rel=0.4)
    burst = list(arrivals(replace(fleet, burst=5.0)))
    late = [one for one in burst if one.at % 15 > 12]
    assert len(late) / len(burst) == pytest.approx(0.5, abs=0.1)
    one, other = (
        {a.adapter for a in arrivals(replace(fleet, shift_s=15.0, zipf=3.0)) if low < a.at < low + 15}
        for low in (0, 15)
    )
    assert len(one & other) < len(one)


def test_affinity_loads_less_than_random_and_never_less_than_the_bound() -> None:
    shape = {"replicas": 3, "adapters": 60, "room": 10, "host_room": 10, "output": 3}
    fleet = Fleet(**shape, rate=3.0, seconds=60.0, warm_s=15.0)
    costs = replace(COSTS, read_s=0.05, write_s=0.01)
    by_chance, ours, bound = compare(fleet, costs, ["random", "manylora"])
    assert ours.loads < by_chance.loads / 2
    assert bound.loads <= ours.loads
    assert bound.ttft_p50 <= ours.ttft_p50 < by_chance.ttft_p50
    assert len(lines([by_chance, ours, bound])) == 5
