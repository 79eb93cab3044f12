#!/usr/bin/env python3
"""Simulates a fleet of servers: how routing, the number of adapters and the fleet's size affect latency and
loads.

The router of `manylora.doors.fleet` and the engine's scheduler, KV cache and adapter cache run unchanged, in
simulated time. Only the durations of steps and loads are given. Arrivals are Poisson, and the popularity of
adapters follows Zipf's law. Popularity can shift over time, and requests can come in bursts.

    fleet_simulation.py                                  one fleet, every policy
    fleet_simulation.py --replicas 100 --adapters 10000 --zipf 1.0 --burst 4

Policies are compared by their cold loads (requests whose server had to read their adapter) and by the time to
first token. The row `bound` has two bounds. Its cold loads are those of one cache that is as large as all
servers' caches together and knows the future. Its time to first token assumes that loading takes no time and
that the least busy server answers.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Protocol

import numpy as np
from simulated_server import Arrival, Clock, Costs, Shape, SimulatedServer

from manylora.doors.fleet.routing import AffinityRouting, Replica

# Steps: the 125M model in bfloat16 on two cores of an AMD EPYC Zen 3. The costs are fitted to 8.7, 17.2 and
# 40.3 ms for 1, 4 and 16 decode rows, and to 61.7 ms for a prompt of 64 rows. Loads: the first load of an
# adapter of rank 16 on every linear layer of Llama-2-7B's shape, 160 MB. Both with the engine of 22 November
# 2026.
MEASURED = Costs(step_s=0.0066, token_s=0.00086, row_s=0.0021, adapter_s=0.00025, read_s=0.146, write_s=0.051)


class Policy(Protocol):
    """The interface of AffinityRouting."""

    def choose(self, adapter: str | None, replicas: Sequence[Replica], now: float) -> list[Replica]: ...

    def sent(self, adapter: str | None, replica: str, now: float) -> None: ...


class RandomChoice:
    def __init__(self) -> None:
        self._random = random.Random(17)

    def choose(self, adapter: str | None, replicas: Sequence[Replica], now: float) -> list[Replica]:
        return [self._random.choice(replicas)]

    def sent(self, adapter: str | None, replica: str, now: float) -> None:
        pass


class LeastBusy:
    """Chooses the least busy server. If every server holds every adapter, no policy here is better."""

    def __init__(self) -> None:
        self._routing = AffinityRouting()

    def choose(self, adapter: str | None, replicas: Sequence[Replica], now: float) -> list[Replica]:
        return self._routing.choose(None, replicas, now)

    def sent(self, adapter: str | None, replica: str, now: float) -> None:
        self._routing.sent(None, replica, now)


class PlainAffinity(LeastBusy):
    """Always chooses the adapter's first home by rendezvous hashing, even if it is busy."""

    def choose(self, adapter: str | None, replicas: Sequence[Replica], now: float) -> list[Replica]:
        if adapter is None:
            return super().choose(None, replicas, now)
        (home,) = self._routing.first_homes(adapter, replicas, 1)
        return [next(replica for replica in replicas if replica.name == home)]


POLICIES: dict[str, Callable[[], Policy]] = {
    "random": RandomChoice,
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
    requests arrived."""

    policy: str
    loads: float
    ttft_p50: float
    ttft_p99: float
    tokens_per_s: float
    busiest: float


def simulate(fleet: Fleet, costs: Costs, policy: Policy, name: str) -> tuple[Found, list[Arrival]]:
    """Send each request to the server that the policy chooses, and run until the last one ends."""
    clock, requests = Clock(), list(arrivals(fleet))
    servers = {f"r{i}": SimulatedServer(f"r{i}", costs, fleet.shape, clock) for i in range(fleet.replicas)}

    def take(place: int) -> None:
        if place + 1 < len(requests):
            clock.at(requests[place + 1].at, take, place + 1)
        states = [server.state for server in servers.values()]
        chosen = policy.choose(requests[place].adapter, states, clock.now)[0].name
        policy.sent(requests[place].adapter, chosen, clock.now)
        servers[chosen].arrive(requests[place])

    clock.at(requests[0].at, take, 0)
    clock.run()
    counted = [one for one in requests if one.at >= fleet.warm_s]
    times = np.array([one.first_token - one.at for one in counted])
    stop = fleet.warm_s + fleet.seconds
    done = sum(one.output for one in requests if fleet.warm_s <= one.end <= stop)
    sent = [server.num_sent for server in servers.values()]
    cold = 1000 * sum(one.cold for one in counted) / len(counted)
    p50, p99 = (float(np.quantile(times, share)) for share in (0.5, 0.99))
    return Found(name, cold, p50, p99, done / fleet.seconds, max(sent) * len(sent) / sum(sent)), requests


def bound(fleet: Fleet, costs: Costs) -> Found:
    """Bounds that no policy can beat; see the module's docstring."""
    free = replace(costs, read_s=0.0, write_s=0.0)
    found, requests = simulate(replace(fleet, host_room=fleet.adapters), free, LeastBusy(), "bound")
    pooled = fewest_loads([one.adapter for one in requests], fleet.host_room * fleet.replicas)
    counted = [load for one, load in zip(requests, pooled, strict=True) if one.at >= fleet.warm_s]
    return replace(found, loads=1000 * sum(counted) / len(counted))


def fewest_loads(adapters: Sequence[str | None], room: int) -> list[bool]:
    """Which requests must load their adapter, if the fleet is one cache of `room` adapters that knows the
    future.

    Uses Belady's algorithm: evict the adapter whose next use is farthest away. No routing over servers with
    the same total capacity can load less often.
    """
    following, seen = [len(adapters)] * len(adapters), dict[str, int]()
    for place in range(len(adapters) - 1, -1, -1):
        name = adapters[place]
        if name is not None:
            following[place] = seen.get(name, len(adapters) + place)
            seen[name] = place
    held: dict[str, int] = {}
    latest: list[tuple[int, str]] = []
    loads = []
    for place, name in enumerate(adapters):
        loads.append(name is not None and name not in held)
        if name is None:
            continue
        held[name] = following[place]
        heapq.heappush(latest, (-following[place], name))
        while len(held) > room:
            needed, victim = heapq.heappop(latest)
            if held.get(victim) == -needed:
                del held[victim]
    return loads


def compare(fleet: Fleet, costs: Costs, names: Sequence[str]) -> list[Found]:
    """Run every policy with the same requests, then the bound."""
    return [*(simulate(fleet, costs, POLICIES[n](), n)[0] for n in names), bound(fleet, costs)]


def lines(found: list[Found]) -> list[str]:
    head = "| policy | cold loads per 1000 | TTFT P50 ms | P99 ms | tokens/s | busiest / mean |"
    rows = [
        f"| {one.policy} | {one.loads:.0f} | {1000 * one.ttft_p50:.0f} | {1000 * one.ttft_p99:.0f} | "
        f"{one.tokens_per_s:.0f} | {one.busiest:.2f} |"
        for one in found
    ]
    return [head, "|---|---|---|---|---|---|", *rows]


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    for name, value in asdict(Fleet()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    for name, value in asdict(MEASURED).items():
        words = name.removesuffix("_s").replace("_", "-")
        parser.add_argument(f"--{words}-seconds", dest=name, type=float, default=value)
    options = vars(parser.parse_args())
    policies, costs = options.pop("policies"), Costs(**{name: options.pop(name) for name in asdict(MEASURED)})
    print("\n".join(lines(compare(Fleet(**options), costs, policies))))


if __name__ == "__main__":
    main()
