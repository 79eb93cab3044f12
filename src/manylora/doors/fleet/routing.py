"""Which replica answers a request: one that holds the adapter, unless it is overloaded.

A pure policy: no clock, no network, no torch. The caller passes the state of the replicas and the time, calls
`choose`, and reports with `sent` where the request went. The rules, most important first:

1. Base model: the least busy replica.
2. A replica that holds the adapter, or was just sent a request for it, and is not overloaded.
3. If none holds it, or all holders are overloaded: the least busy of the adapter's few *homes*, which loads
   it. Homes are the first replicas by rendezvous hashing. All routers therefore find the same ones without
   communication, and a replica that is added or removed only moves its own adapters.
4. All others, least busy first.

The number of an adapter's homes follows from the number of replicas that its traffic keeps busy: cold
adapters concentrate on one replica, hot ones spread. A pinned adapter has fixed homes, where requests wait.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from math import ceil
from typing import Any

from manylora.adapters.catalog.names import ASKERS, LATEST, Aliases

MASK = (1 << 64) - 1
# The policy's parameters. A replica is overloaded if it is this busy, and busier than the fleet's mean by the
# factor IMBALANCE: if all are busy, cold loads only add work.
OVERLOAD, IMBALANCE = 1.0, 1.25
HOMES = 2  # of which the least busy loads an adapter
TARGET = 0.5  # a hot adapter gets a home for every TARGET of a replica that it keeps busy
HALF_LIFE_S = 30.0  # after which a past request counts half in an adapter's rate
LOADING_S = 5.0  # for which a replica counts as a holder after a request: reports take time
REMEMBERED = 8192  # adapters whose rate and placement are stored; the least recently seen goes first


@dataclass(frozen=True, slots=True)
class Replica:
    """What a router knows about a server. `device`, `host`: the adapters on each cache level, or on both."""

    name: str
    capacity: int  # requests that it runs at a time
    running: int = 0
    waiting: int = 0
    device: Collection[str] = frozenset()
    host: Collection[str] = frozenset()

    @property
    def busy(self) -> float:
        """Requests in it, relative to those it can run. Above 1, some wait."""
        return (self.running + self.waiting) / self.capacity


@dataclass(slots=True)
class Count:
    """A count of requests, each halved every HALF_LIFE_S."""

    value: float = 0.0
    at: float = 0.0

    def read(self, now: float) -> float:
        return self.value * 0.5 ** (max(0.0, now - self.at) / HALF_LIFE_S)

    def add(self, now: float) -> None:
        self.value, self.at = self.read(now) + 1, max(now, self.at)


@dataclass(slots=True)
class Seen:
    """One remembered adapter: its requests, and when it was last sent to each replica."""

    count: Count = field(default_factory=Count)
    placed: dict[str, float] = field(default_factory=dict)


class AffinityRouting:
    """See the module's docstring. Not thread-safe. Times are in seconds and must not decrease."""

    def __init__(self, pinned: Mapping[str, int] | None = None) -> None:
        """`pinned`: adapter → number of homes."""
        self.pinned = dict(pinned or {})
        self.total = Count()
        self.turn = 0
        self.seen: OrderedDict[str, Seen] = OrderedDict()

    def choose(self, adapter: str | None, replicas: Sequence[Replica], now: float) -> list[Replica]:
        """The replicas in order of preference. `adapter`: name or digest; None: base model. Has no effect
        on later answers: call it as often as you like, then call `sent` once."""
        turn = self.turn  # for ties a different order for every request

        def least_busy(replica: Replica) -> tuple[float, int]:
            return replica.busy, mix(hash_of(replica.name) ^ turn)

        order = sorted(replicas, key=least_busy)
        if adapter is None or len(replicas) < 2:
            return order
        preferred = self._preferred(adapter, replicas, now, least_busy)
        names = {replica.name for replica in preferred}
        return preferred + [replica for replica in order if replica.name not in names]

    def sent(self, adapter: str | None, replica: str, now: float) -> None:
        """A request went to the replica of this name (once per request, after its last retry)."""
        self.turn += 1
        self.total.add(now)
        if adapter is None:
            return
        seen = self.seen.setdefault(adapter, Seen())
        self.seen.move_to_end(adapter)
        seen.count.add(now)
        seen.placed[replica] = now
        if len(seen.placed) > HOMES:
            oldest = now - LOADING_S
            seen.placed = {name: at for name, at in seen.placed.items() if at >= oldest}
        while len(self.seen) > REMEMBERED:
            self.seen.popitem(last=False)

    def copies(self, adapter: str, replicas: Sequence[Replica], now: float) -> int:
        """How many replicas should hold it, from its share of the requests and how busy the fleet is."""
        if adapter in self.pinned:
            return max(1, min(self.pinned[adapter], len(replicas)))
        seen, total = self.seen.get(adapter), self.total.read(now)
        if seen is None or total <= 0:
            return 1
        share = min(1.0, seen.count.read(now) / total)
        demand = share * sum(replica.busy for replica in replicas) / TARGET
        return max(1, min(ceil(demand), len(replicas)))

    def first_homes(self, adapter: str, replicas: Sequence[Replica], count: int) -> list[str]:
        """The names of the adapter's first `count` replicas by rendezvous hashing."""
        own = hash_of(adapter)
        names = (replica.name for replica in replicas)
        return heapq.nlargest(count, names, key=lambda name: mix(own ^ hash_of(name)))

    def _preferred(
        self,
        adapter: str,
        replicas: Sequence[Replica],
        now: float,
        least_busy: Callable[[Replica], tuple[float, int]],
    ) -> list[Replica]:
        """Holders with room, then homes with room. The order differs if one more copy is due."""
        by_name = {replica.name: replica for replica in replicas}
        copies = self.copies(adapter, replicas, now)
        pinned = adapter in self.pinned
        count = copies if pinned else max(copies, HOMES)
        homes = [by_name[name] for name in self.first_homes(adapter, replicas, count)]
        if pinned:
            return sorted(homes, key=least_busy)
        # A replica that is this busy counts as overloaded.
        mean = sum(replica.busy for replica in replicas) / len(replicas)
        limit = max(OVERLOAD, IMBALANCE * mean)
        # Which replicas hold the adapter: 0 on the device, 1 on the host or loading.
        placed, oldest = self.seen.get(adapter, Seen()).placed, now - LOADING_S
        levels = {}
        for replica in replicas:
            if adapter in replica.device:
                levels[replica.name] = 0
            elif adapter in replica.host or placed.get(replica.name, oldest) > oldest:
                levels[replica.name] = 1
        free = sorted((r for r in replicas if r.name in levels and r.busy < limit), key=least_busy)
        if len(levels) > copies:  # more copies than needed: keep those at home, let the others age
            places = {home.name: place for place, home in enumerate(homes)}
            kept = sorted(free, key=lambda r: places.get(r.name, len(homes)))[:copies]
            free = sorted(kept, key=least_busy) + [r for r in free if r not in kept]
        free.sort(key=lambda r: levels[r.name] if copies == 1 else 0)
        fresh = sorted((h for h in homes if h.name not in levels and h.busy < limit), key=least_busy)
        better = fresh and (not free or fresh[0].busy + TARGET < free[0].busy)
        return fresh[:1] + free + fresh[1:] if better and len(levels) < copies else free + fresh


@lru_cache(2**14)
def hash_of(name: str) -> int:
    """64 bits that depend only on the name: equal in every process."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")


def mix(value: int) -> int:
    """The finishing steps of splitmix64: each of the 64 bits depends on all bits of `value`."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


class Reports:
    """A replica is silent if its last report came `silent_s` before the newest report of another. If none
    reports, the cause is not the replicas. One that has never reported counts from when it was first seen."""

    def __init__(self, silent_s: float) -> None:
        self._silent_s = silent_s
        self._last: dict[str, tuple[int, float]] = {}  # by replica: number of the report, and when it came
        self.silent: frozenset[str] = frozenset()

    def note(self, numbers: Mapping[str, int], now: float) -> None:
        """numbers: of the last report of every existing replica. A different number means a new report."""
        last = {name: self._last.get(name, (number, now)) for name, number in numbers.items()}
        for name, number in numbers.items():
            last[name] = last[name] if last[name][0] == number else (number, now)
        self._last = last
        newest = max((at for _, at in self._last.values()), default=now)
        self.silent = frozenset(name for name, (_, at) in self._last.items() if newest - at >= self._silent_s)


def requested_adapter(fields: Mapping[str, Any], bases: Sequence[str], aliases: Aliases) -> str | None:
    """The adapter's name; None: the base model. For a mix its first adapter: equal mixes go to one replica.

    fields: of the body, not validated. A wrong guess only costs a cold load.
    """
    lora, request = fields.get("lora"), fields.get("lora_request")
    given = fields.get("parameters")  # of TGI's and LoRAX's API
    if isinstance(given, dict):
        merged = given.get("merged_adapters")
        ids = merged.get("ids") if isinstance(merged, dict) else None
        members = [{"name": one} for one in ids] if isinstance(ids, list) else lora
        fields, lora = {**fields, "adapter_id": given.get("adapter_id")}, members
    named = [fields.get(name) for name in ("lora_model", "adapter_id", "lora_path")]
    named.append(request.get("lora_name") if isinstance(request, dict) else None)
    first = lora[0] if isinstance(lora, list) and lora else None
    named += [first.get("name") if isinstance(first, dict) else None, fields.get("model")]
    name = next((one for one in named if isinstance(one, str) and one), "").removesuffix(LATEST)
    base = next((base for base in bases if name == base or name.startswith(base + ":")), None)
    name = name if base is None else name[len(base) + 1 :]
    name = name.partition("+")[0]  # adapter names never contain a +
    by = next((one for one in map(fields.get, ASKERS) if isinstance(one, str) and one), None)
    meant = aliases.resolve(name, by) if name else None
    return None if meant in bases else meant
