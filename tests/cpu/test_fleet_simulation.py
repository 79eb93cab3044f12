"""Protects what the fleet's simulation says: its servers compute what they are asked, loads are counted, the
bounds hold."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))  # scripts, not a package

from fleet_simulation import Fleet, compare, fewest_loads, lines  # noqa: E402
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


def test_affinity_loads_less_than_random_and_never_less_than_the_bound() -> None:
    shape = {"replicas": 3, "adapters": 60, "room": 10, "host_room": 10, "output": 3}
    fleet = Fleet(**shape, rate=3.0, seconds=60.0, warm_s=15.0)
    costs = replace(COSTS, read_s=0.05, write_s=0.01)
    by_chance, ours, bound = compare(fleet, costs, ["random", "manylora"])
    assert ours.loads < by_chance.loads / 2
    assert bound.loads <= ours.loads
    assert bound.ttft_p50 <= ours.ttft_p50 < by_chance.ttft_p50
    assert len(lines([by_chance, ours, bound])) == 5
