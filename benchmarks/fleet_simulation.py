#!/usr/bin/env python3
"""Simulates a fleet of servers: how routing, the number of adapters and the fleet's size affect latency and
loads.

The router of `manylora.fleet` and the engine's scheduler, KV cache and adapter cache run unchanged, in
simulated time. Only the durations of steps and loads are given; fleet_calibrate.py measures them. Arrivals
are Poisson, and the popularity of adapters follows Zipf's law. Popularity can shift over time, and requests
can come in bursts.

    fleet_simulation.py                                  one fleet, every policy
    fleet_simulation.py --replicas 100 --adapters 10000 --zipf 1.0 --burst 4
    fleet_simulation.py --study all --json found.json    the tables of docs/scaling.md

Policies are compared by their cold loads (requests whose server had to read their adapter) and by the time to
first token. The row `bound` has two bounds. Its cold loads are those of one cache that is as large as all
servers' caches together and knows the future. Its time to first token assumes that loading takes no time and
that the least busy server answers.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from fleet_policies import LeastBusy, PlainAffinity, Policy, RandomChoice, RoundRobin, fewest_loads
from simulated_server import Arrival, Clock, Costs, Shape, SimulatedServer

from manylora.fleet.routing import AffinityRouting

# Steps: the 125M model in bfloat16 on two cores of an AMD EPYC Zen 3. The costs are fitted to 8.7, 17.2 and
# 40.3 ms for 1, 4 and 16 decode rows, and to 61.7 ms for a prompt of 64 rows. Loads: the first load of an
# adapter of rank 16 on every linear layer of Llama-2-7B's shape, 160 MB. Both with the engine of 22 November
# 2026.
MEASURED = Costs(step_s=0.0066, token_s=0.00086, row_s=0.0021, adapter_s=0.00025, read_s=0.146, write_s=0.051)
POLICIES: dict[str, Callable[[], Policy]] = {
    "random": RandomChoice,
    "round robin": RoundRobin,
    "plain affinity": PlainAffinity,
    "manylora": AffinityRouting,
}


@dataclass(frozen=True)
class Fleet:
    """One case.

    rate: requests per second and replica. zipf: the n-th adapter is used n ** -zipf as often as the first, 0
    for equal popularity. shift_s: seconds after which other adapters become popular, 0 for never. burst:
    factor of the rate during 3 s of every 15 s, 1 for no bursts. base: share of requests without an adapter.
    warm_s: seconds at the beginning that are not counted. prompt, output: tokens (output: the mean). room,
    host_room: adapters on each server's device and host level. batch: requests in a step.
    """

    replicas: int = 10
    adapters: int = 1000
    rate: float = 4.0
    zipf: float = 1.0
    shift_s: float = 0.0
    burst: float = 1.0
    base: float = 0.0
    seconds: float = 20.0
    warm_s: float = 16.0
    prompt: int = 32
    output: int = 32
    room: int = 20
    host_room: int = 40
    batch: int = 16
    seed: int = 1

    @property
    def shape(self) -> Shape:
        return Shape(self.room, self.host_room, self.batch)


def arrivals(fleet: Fleet) -> Iterator[Arrival]:
    """The requests in order of time. They are the same for every policy."""
    chance = np.random.default_rng(fleet.seed)
    weights = np.arange(1, fleet.adapters + 1) ** -fleet.zipf
    total = np.cumsum(weights / weights.sum())
    order, shifted = chance.permutation(fleet.adapters), 0
    now, stop = 0.0, fleet.warm_s + fleet.seconds
    while True:
        rate = fleet.rate * fleet.replicas * (fleet.burst if now % 15 > 12 else 1)
        now += chance.exponential(1 / rate)
        if now >= stop:
            return
        if fleet.shift_s and now // fleet.shift_s > shifted:
            shifted = int(now // fleet.shift_s)
            order = chance.permutation(fleet.adapters)
        name = None
        rank = int(np.searchsorted(total, chance.random()))
        if chance.random() >= fleet.base:
            name = f"adapter-{order[min(rank, fleet.adapters - 1)]}"
        yield Arrival(now, name, fleet.prompt, 1 + int(chance.geometric(1 / fleet.output)))


@dataclass(frozen=True)
class Found:
    """The figures of one policy, after the warm-up. Times in seconds. loads: cold loads per 1000 requests.
    busiest: requests of the busiest server, divided by the mean. tokens_per_s: output of the fleet while
    requests arrived. router_s: real CPU seconds per choice."""

    policy: str
    requests: int
    loads: float
    ttft_p50: float
    ttft_p99: float
    tokens_per_s: float
    busiest: float
    router_s: float


def replay(
    requests: list[Arrival], servers: dict[str, SimulatedServer], policy: Policy, clock: Clock
) -> float:
    """Send each request to the server that the policy chooses, and run until the last one ends. Returns the
    real CPU seconds per choice."""
    spent = 0.0

    def take(place: int) -> None:
        nonlocal spent
        if place + 1 < len(requests):
            clock.at(requests[place + 1].at, take, place + 1)
        states = [server.state for server in servers.values()]
        adapter = requests[place].adapter
        began = time.thread_time()
        chosen = policy.choose(adapter, states, clock.now, 1)[0].name
        policy.sent(adapter, chosen, clock.now)
        spent += time.thread_time() - began
        servers[chosen].arrive(requests[place])

    clock.at(requests[0].at, take, 0)
    clock.run()
    return spent / len(requests)


def simulate(
    fleet: Fleet, costs: Costs, policy: Policy, name: str, trace: list[Arrival] | None = None
) -> tuple[Found, list[Arrival]]:
    """Run the arrivals through one fleet until the last request ends."""
    clock = Clock()
    servers = {f"r{i}": SimulatedServer(f"r{i}", costs, fleet.shape, clock) for i in range(fleet.replicas)}
    requests = list(arrivals(fleet)) if trace is None else trace
    router_s = replay(requests, servers, policy, clock)
    return summary(fleet, name, requests, list(servers.values()), router_s), requests


def summary(
    fleet: Fleet, name: str, requests: list[Arrival], servers: list[SimulatedServer], router_s: float
) -> Found:
    counted = [one for one in requests if one.at >= fleet.warm_s]
    times = np.array([one.first_token - one.at for one in counted])
    stop = fleet.warm_s + fleet.seconds
    done = sum(one.output for one in requests if fleet.warm_s <= one.end <= stop)
    sent = [server.num_sent for server in servers]
    return Found(
        name,
        len(counted),
        1000 * sum(one.cold for one in counted) / len(counted),
        float(np.quantile(times, 0.5)),
        float(np.quantile(times, 0.99)),
        done / fleet.seconds,
        max(sent) * len(sent) / sum(sent),
        router_s,
    )


def bound(fleet: Fleet, costs: Costs) -> Found:
    """Bounds that no policy can beat; see the module's docstring."""
    free = replace(costs, read_s=0.0, write_s=0.0)
    found, requests = simulate(replace(fleet, host_room=fleet.adapters), free, LeastBusy(), "bound")
    pooled = fewest_loads([one.adapter for one in requests], fleet.host_room * fleet.replicas)
    counted = [load for one, load in zip(requests, pooled, strict=True) if one.at >= fleet.warm_s]
    return replace(found, loads=1000 * sum(counted) / len(counted))


def compare(
    fleet: Fleet, costs: Costs, names: list[str] | None = None, with_bound: bool = True
) -> list[Found]:
    """Run every policy with the same requests, then the bound."""
    chosen = list(POLICIES) if names is None else names
    found = [simulate(fleet, costs, POLICIES[n](), n)[0] for n in chosen]
    return [*found, bound(fleet, costs)] if with_bound else found


def lines(found: list[Found]) -> list[str]:
    head = "| policy | cold loads per 1000 | TTFT P50 ms | P99 ms | tokens/s | busiest / mean | choice µs |"
    rows = [
        f"| {one.policy} | {one.loads:.0f} | {1000 * one.ttft_p50:.0f} | {1000 * one.ttft_p99:.0f} | "
        f"{one.tokens_per_s:.0f} | {one.busiest:.2f} | {1e6 * one.router_s:.0f} |"
        for one in found
    ]
    return [head, "|---|---|---|---|---|---|---|", *rows]


BASE = Fleet()
LARGE = replace(BASE, rate=2.0, output=4, room=4, host_room=4, seconds=4.0, warm_s=4.0)
STUDIES: dict[str, list[Fleet]] = {
    "popularity": [replace(BASE, zipf=zipf) for zipf in (0.0, 0.8, 1.0, 1.5)],
    "change": [replace(BASE, shift_s=15.0), replace(BASE, burst=2.0)],
    "adapters": [replace(BASE, adapters=many) for many in (100, 300, 3000, 100000)],
    "load": [replace(BASE, rate=rate) for rate in (1.0, 6.0, 8.0)],
    "size": [replace(BASE, replicas=many, adapters=100 * many) for many in (1, 3, 30)],
    "large": [replace(LARGE, replicas=many, adapters=100 * many) for many in (10, 100, 300, 1000)],
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in asdict(BASE).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), help="default: all")
    parser.add_argument(
        "--no-bound", action="store_true", help="skip the bound, which takes as long as a policy"
    )
    parser.add_argument("--costs", type=Path, help="JSON of fleet_calibrate.py (default: the 125M model's)")
    parser.add_argument(
        "--study", choices=[*STUDIES, "all"], help="run these cases of docs/scaling.md instead"
    )
    parser.add_argument("--json", type=Path, help="write the results there")
    options = parser.parse_args()
    costs = MEASURED
    if options.costs is not None:
        costs = Costs(**json.loads(options.costs.read_text(encoding="utf-8"))["costs"])
    one = Fleet(**{name: getattr(options, name) for name in asdict(BASE)})
    studies = STUDIES if options.study == "all" else {options.study: STUDIES.get(options.study, [one])}
    written: list[dict[str, Any]] = []
    for study, fleets in studies.items():
        for fleet in fleets:
            began = time.perf_counter()
            found = compare(fleet, costs, options.policies, not options.no_bound)
            changed = {k: v for k, v in asdict(fleet).items() if v != getattr(BASE, k) or k == "replicas"}
            print(f"\n{study or 'fleet'}: {changed}, {time.perf_counter() - began:.0f} s", flush=True)
            print("\n".join(lines(found)), flush=True)
            written.append({"study": study, "fleet": asdict(fleet), "found": [asdict(row) for row in found]})
    if options.json is not None:
        options.json.write_text(json.dumps({"costs": asdict(costs), "cases": written}), encoding="utf-8")


if __name__ == "__main__":
    main()
