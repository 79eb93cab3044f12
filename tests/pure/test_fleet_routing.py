"""Protects a fleet, without Ray: holders first, few copies of cold adapters and several of hot ones; what is
made of options and requests, and how replicas' exports are merged."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from manylora.adapters.catalog.names import Aliases
from manylora.doors.fleet.member import RemoteRequest, answer, merge_metrics, whole_answer
from manylora.doors.fleet.options import parse_options, read_args
from manylora.doors.fleet.routing import AffinityRouting, Replica, Reports, requested_adapter
from manylora.errors import ConfigError


def fleet(count: int, **changes: Replica) -> list[Replica]:
    """`count` idle replicas r0, r1 ..., those named in `changes` replaced."""
    return [changes.get(f"r{i}", Replica(f"r{i}", capacity=8)) for i in range(count)]


def names(replicas: list[Replica]) -> list[str]:
    return [replica.name for replica in replicas]


def first(routing: AffinityRouting, adapter: str | None, replicas: list[Replica], now: float = 0.0) -> str:
    return routing.choose(adapter, replicas, now)[0].name


def test_a_holder_comes_first_and_every_replica_comes_once() -> None:
    routing = AffinityRouting()
    for holder in ("r0", "r3", "r6"):
        replicas = fleet(7, **{holder: Replica(holder, 8, running=5, device={"a"})})
        order = names(routing.choose("a", replicas, 0.0))
        assert order[0] == holder
        assert sorted(order) == sorted(names(replicas))


def test_the_device_level_counts_more_than_the_host_level() -> None:
    on_host, on_device = Replica("r1", 8, host={"a"}), Replica("r2", 8, running=3, device={"a"}, host={"a"})
    assert names(AffinityRouting().choose("a", fleet(4, r1=on_host, r2=on_device), 0.0))[:2] == ["r2", "r1"]


def test_an_overloaded_holder_gives_way_to_the_less_busy_home() -> None:
    routing = AffinityRouting()
    homes = routing.first_homes("a", fleet(6), 2)
    holder = next(name for name in names(fleet(6)) if name not in homes)
    changes = {
        holder: Replica(holder, 8, running=8, waiting=8, device={"a"}),
        homes[0]: Replica(homes[0], 8, running=4),
    }
    assert first(routing, "a", fleet(6, **changes)) == homes[1]


def test_base_requests_go_to_the_least_busy_and_equals_take_turns() -> None:
    routing = AffinityRouting()
    assert first(routing, None, fleet(4, r0=Replica("r0", 8, 2), r1=Replica("r1", 4, 2))) in ("r2", "r3")
    chosen = Counter()
    for _ in range(400):
        name = first(routing, None, fleet(4))
        routing.sent(None, name, 0.0)
        chosen[name] += 1
    assert min(chosen.values()) > 60


def test_a_replica_that_loads_an_adapter_counts_as_its_holder_until_its_report_is_due() -> None:
    routing = AffinityRouting()
    homes = routing.first_homes("a", fleet(6), 2)
    for _ in range(20):  # it is one of many: no second copy is due
        routing.sent(None, "r0", 10.0)
    routing.sent("a", homes[0], 10.0)
    busier = fleet(6, **{homes[0]: Replica(homes[0], 8, running=6)})
    assert first(routing, "a", busier, 14.0) == homes[0]
    assert first(routing, "a", busier, 16.0) == homes[1]


def test_homes_are_even_and_the_same_in_every_router() -> None:
    replicas, adapters = fleet(10), [f"adapter-{i}" for i in range(5000)]
    routing = AffinityRouting()
    homes = {a: routing.first_homes(a, replicas, 1)[0] for a in adapters}
    again = AffinityRouting()
    assert homes == {a: again.first_homes(a, replicas[::-1], 1)[0] for a in adapters}
    counts = Counter(homes.values())
    assert min(counts.values()) > 400 and max(counts.values()) < 600  # 500 ± 4.7 standard deviations


def test_a_replica_that_leaves_or_comes_moves_only_its_own_adapters() -> None:
    adapters = [f"adapter-{i}" for i in range(3000)]
    routing = AffinityRouting()
    ten = {a: routing.first_homes(a, fleet(10), 1)[0] for a in adapters}
    nine = {a: routing.first_homes(a, fleet(9), 1)[0] for a in adapters}
    moved = [a for a in adapters if ten[a] != nine[a]]
    assert {ten[a] for a in moved} == {"r9"}
    assert 200 < len(moved) < 400
    assert {a: routing.first_homes(a, fleet(10), 1)[0] for a in adapters} == ten


class World:
    """Replicas that hold what they were sent (the last `room` adapters); a request takes `seconds`."""

    def __init__(self, count: int, room: int, seconds: float) -> None:
        self.held: dict[str, list[str]] = {f"r{i}": [] for i in range(count)}
        self.ends: dict[str, list[float]] = {name: [] for name in self.held}
        self.room, self.seconds, self.loads = room, seconds, 0
        self.sent: Counter[str] = Counter()

    def replicas(self, now: float) -> list[Replica]:
        self.ends = {name: [end for end in ends if end > now] for name, ends in self.ends.items()}
        return [Replica(n, 8, len(self.ends[n]), 0, device=self.held[n]) for n in self.held]

    def request(self, routing: AffinityRouting, adapter: str | None, now: float) -> str:
        name = routing.choose(adapter, self.replicas(now), now)[0].name
        routing.sent(adapter, name, now)
        self.ends[name].append(now + self.seconds)
        self.sent[name] += 1
        if adapter is not None:
            held = self.held[name]
            self.loads += adapter not in held
            held[:] = [*[a for a in held if a != adapter][-self.room + 1 :], adapter]
        return name


def test_a_hot_adapter_spreads_and_cold_ones_stay_on_one_replica() -> None:
    world, routing, chance = World(8, room=50, seconds=1.0), AffinityRouting(), random.Random(1)
    used: dict[str, set[str]] = {}
    for i in range(4000):
        adapter = "hot" if chance.random() < 0.6 else f"cold-{chance.randrange(100)}"
        used.setdefault(adapter, set()).add(world.request(routing, adapter, i / 40))
    assert len(used["hot"]) >= 5  # 60 % of 40 busy places of 64, at half of a replica each: 6 copies
    assert sum(len(where) for name, where in used.items() if name != "hot") / 100 < 2
    assert max(world.sent.values()) < 2 * 4000 / 8


def test_a_pinned_adapter_stays_on_its_homes_however_busy_they_are() -> None:
    routing = AffinityRouting(pinned={"p": 2})
    homes = routing.first_homes("p", fleet(6), 2)
    busy = {name: Replica(name, 8, 8, 50) for name in homes}
    other = next(name for name in names(fleet(6)) if name not in homes)
    busy[other] = Replica(other, 8, device={"p"})
    order = names(routing.choose("p", fleet(6, **busy), 0.0))
    assert set(order[:2]) == set(homes)
    gone = [replica for replica in fleet(6, **busy) if replica.name not in homes]
    assert names(routing.choose("p", gone, 0.0))[0] in names(gone)


def test_a_replica_that_stops_reporting_is_silent_until_it_reports_again() -> None:
    reports = Reports(3.0)
    for second in range(10):
        reports.note({"a": second, "b": min(second, 4)}, float(second))
        assert reports.silent == (frozenset({"b"}) if second >= 7 else frozenset())
    reports.note({"a": 10, "b": 5, "new": -1}, 10.0)
    assert reports.silent == frozenset()
    reports.note({"a": 11, "new": -1}, 13.0)
    assert reports.silent == frozenset({"new"}), "it has had its time; one that went is forgotten"


def test_flags_and_the_args_of_an_application_mean_the_same(tmp_path: Path) -> None:
    flags = ["m", "--lora-root", str(tmp_path), "--replicas", "3", "--max-replicas", "5", "--pin", "a=2"]
    args = {"model": "m", "lora_root": [str(tmp_path)], "replicas": 3, "max_replicas": 5, "pin": ["a=2"]}
    assert parse_options(flags) == read_args(args)
    assert parse_options(flags).pin == (("a", 2),)
    assert (parse_options(flags).least_replicas, parse_options(flags).most_replicas) == (3, 5)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"restart": True}, "restart has no effect in a fleet: Ray starts"),
        ({"triton_url": "localhost:1"}, "triton_url has no effect in a fleet"),
        ({"replicas": 3, "max_replicas": 2}, "replicas must be from 3 to 2"),
        ({"min_replicas": 1}, "need max_replicas"),
        ({"pin": ["a=0"]}, "pin must be NAME or NAME=REPLICAS"),
        ({"repilcas": 3}, "repilcas"),
        ({"model": None}, "model"),
    ],
)
def test_what_cannot_act_is_refused_by_name(args: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_args({"model": "m", **args})


def test_the_ranks_of_a_replica_count_for_what_ray_gives_it(tmp_path: Path) -> None:
    two = {"model": "org/name", "replicas": 2, "tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    options = read_args({**two, "replica_cpus": 9})
    assert (options.ranks, options.threads({}), options.threads({"OMP_NUM_THREADS": "3"})) == (4, 2, None)
    assert read_args(two).cpus >= 4
    assert (options.gpus(0), options.gpus(8), read_args({**two, "replica_gpus": 4}).gpus(0)) == (0, 4, 4)
    with pytest.raises(ConfigError, match="2 replicas of 4 ranks need 8 GPUs, and there are 7"):
        options.gpus(7)
    with pytest.raises(ConfigError, match=r"replica_gpus must be 4, one for each rank, or 0; got 0\.5"):
        read_args({**two, "replica_gpus": 0.5}).gpus(8)
    alone = read_args({"model": "org/name", "replicas": 2})
    assert (alone.ranks, alone.threads({}), alone.gpus(1), alone.gpus(8)) == (1, None, 0.5, 1)


def test_metrics_of_replicas_become_one_text_with_a_label() -> None:
    text = '# HELP a Help\n# TYPE a gauge\na 1\na{x="}"} 2\n# HELP h H\n# TYPE h histogram\n'
    joined = merge_metrics(
        {"r1": f"{text}h_sum 3\nh_count 1\n", "r2": "# HELP a Help\n# TYPE a gauge\na 5\n"}
    )
    assert joined.splitlines() == [
        "# HELP a Help",
        "# TYPE a gauge",
        'a{replica="r1"} 1',
        'a{x="}",replica="r1"} 2',
        'a{replica="r2"} 5',
        "# HELP h H",
        "# TYPE h histogram",
        'h_sum{replica="r1"} 3',
        'h_count{replica="r1"} 1',
    ]


def call(path: str, body: bytes = b"") -> RemoteRequest:
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [(b"x-a", b"1")],
        "query_string": b"q=2",
    }
    return RemoteRequest.of(Request({**scope, "http_version": "1.1", "app": object()}), body)


def test_a_call_is_answered_by_an_application_elsewhere() -> None:
    async def echo(request: Request) -> PlainTextResponse:
        return PlainTextResponse(
            (await request.body()) + request.headers["x-a"].encode() + request.url.query.encode()
        )

    app = Starlette(routes=[Route("/echo", echo, methods=["POST"])])
    found = asyncio.run(whole_answer(app, call("/echo", b"body ")))
    assert (found.status_code, found.body) == (200, b"body 1q=2")


def test_closing_the_answer_is_seen_as_a_client_that_left() -> None:
    left = []

    async def endless(request: Request) -> StreamingResponse:
        async def lines():
            try:
                while True:
                    yield b"line\n"
                    await asyncio.sleep(0)
            finally:
                left.append(True)

        return StreamingResponse(lines())

    async def run() -> None:
        messages = answer(Starlette(routes=[Route("/", endless, methods=["POST"])]), call("/"))
        assert (await anext(messages))[0]["type"] == "http.response.start"
        await messages.aclose()

    asyncio.run(run())
    assert left


@pytest.mark.parametrize(
    ("fields", "adapter"),
    [
        ({}, None),
        ({"model": "base"}, None),
        ({"model": "a"}, "a"),
        ({"model": "a:latest"}, "a"),
        ({"model": "base:a"}, "a"),
        ({"model": "short"}, "long"),
        ({"model": "both"}, "a"),
        ({"model": "both", "safety_identifier": "user-6"}, "long"),
        ({"model": "base", "lora_request": {"lora_name": "a"}}, "a"),
        ({"model": "a+b"}, "a"),
        ({"model": "base", "lora": [{"name": "a", "scale": 0.5}, {"name": "b"}]}, "a"),
        ({"model": 1, "lora": [2], "lora_request": 3, "adapter_id": None}, None),
    ],
)
def test_the_adapter_that_is_asked_for(fields: dict[str, Any], adapter: str | None) -> None:
    assert requested_adapter(fields, ("base",), Aliases({"short": "long", "both": "a@1,long@1"})) == adapter
