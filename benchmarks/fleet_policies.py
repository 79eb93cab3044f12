"""Routing policies to compare with `manylora.fleet.routing.AffinityRouting`, and a bound on cold loads."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from typing import Protocol

from manylora.fleet.routing import AffinityRouting, Replica


class Policy(Protocol):
    """The interface of AffinityRouting."""

    def choose(
        self, adapter: str | None, replicas: Sequence[Replica], now: float, limit: int | None = None
    ) -> list[Replica]: ...

    def sent(self, adapter: str | None, replica: str, now: float) -> None: ...


class RandomChoice:
    def __init__(self) -> None:
        self._random = random.Random(17)

    def choose(
        self, adapter: str | None, replicas: Sequence[Replica], now: float, limit: int | None = None
    ) -> list[Replica]:
        return [self._random.choice(replicas)]

    def sent(self, adapter: str | None, replica: str, now: float) -> None:
        pass


class RoundRobin:
    def __init__(self) -> None:
        self._turn = 0

    def choose(
        self, adapter: str | None, replicas: Sequence[Replica], now: float, limit: int | None = None
    ) -> list[Replica]:
        return [replicas[self._turn % len(replicas)]]

    def sent(self, adapter: str | None, replica: str, now: float) -> None:
        self._turn += 1


class LeastBusy:
    """Chooses the least busy server. If every server holds every adapter, no policy here is better."""

    def __init__(self) -> None:
        self._routing = AffinityRouting()

    def choose(
        self, adapter: str | None, replicas: Sequence[Replica], now: float, limit: int | None = None
    ) -> list[Replica]:
        return self._routing.choose(None, replicas, now, limit)

    def sent(self, adapter: str | None, replica: str, now: float) -> None:
        self._routing.sent(None, replica, now)


class PlainAffinity(LeastBusy):
    """Always chooses the adapter's first home by rendezvous hashing, even if it is busy."""

    def choose(
        self, adapter: str | None, replicas: Sequence[Replica], now: float, limit: int | None = None
    ) -> list[Replica]:
        if adapter is None:
            return super().choose(None, replicas, now, limit)
        (home,) = self._routing.first_homes(adapter, replicas, 1)
        return [next(replica for replica in replicas if replica.name == home)]


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
