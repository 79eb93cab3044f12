#!/usr/bin/env python3
"""A real fleet beside the simulated one: the same arrivals to `manylora fleet` on a real Ray, and in
simulated time to replicas of the same names, so that adapters have the same homes.

    fleet_compare.py --rates 0.8 1.2 1.6 --json compared.json

Steps and loads of a tiny model are stretched to known times by sleeping, as in fleet_calibrate.py: what is
compared is the routing with its reports, the endpoint, Ray, and the engines' threads and caches. Two times
are measured, before what is counted: `write_s` on an idle engine, and the way to the engine and back on the
idle fleet, by requests for the base model one after the other; half of it counts for each direction.
For each rate and routing a new fleet is started; the first arrivals only warm it up. Random routing is
simulated with the choices that were made. Needs `pip install 'manylora[fleet]'`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import fleet as real_fleet
import numpy as np
from cold_loads import make_adapter
from fleet_calibrate import STOPPED_S, STRETCHED, Stops, Watched, rooms, write_seconds
from fleet_calibrate import answer as in_process
from fleet_policies import LeastBusy, Policy
from fleet_simulation import Fleet, arrivals, replay
from loads import make_llama
from machine import Others, see_machine, wait_for_quiet
from simulated_server import Arrival, Clock, Costs, SimulatedServer

from manylora.commands.fleet import close_ray
from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.engine.loop import EngineLoop
from manylora.fleet.options import parse_options
from manylora.fleet.routing import AffinityRouting, Replica

SERVE = "--serve-stretched"
VOCABULARY = 8192
PROBES = 12
BASE_MODEL = "model"


def serve(arguments: list[str]) -> None:
    """`manylora fleet` with these arguments, whose replicas have stretched engines."""
    options = parse_options(arguments)
    close_ray()
    from manylora.fleet import application, local

    class Stretched(application.ServerReplica):
        async def __init__(self, options: Any) -> None:  # type: ignore[misc]
            from manylora.engine import engine

            engine.Engine = lambda config: Watched(config, STRETCHED)  # type: ignore[assignment,misc]
            await super().__init__(options)

    application.ServerReplica = Stretched  # type: ignore[misc]
    local.run(options)


def figures(trace: list[Arrival], loads: int) -> dict[str, float]:
    times = [one.first_token - one.at for one in trace]
    return {
        "cold_loads": loads,
        "ttft_mean": statistics.fmean(times),
        "ttft_p50": float(np.quantile(times, 0.5)),
        "ttft_p90": float(np.quantile(times, 0.9)),
        "ttft_p99": float(np.quantile(times, 0.99)),
        "seconds_per_request": statistics.fmean(one.end - one.at for one in trace),
    }


class Replayed(LeastBusy):
    """The replicas that answered a measured run, in the order of the requests."""

    def __init__(self, chosen: list[str]) -> None:
        super().__init__()
        self._chosen = iter(chosen)

    def choose(
        self, adapter: str | None, replicas: Sequence[Replica], now: float, limit: int | None = None
    ) -> list[Replica]:
        name = next(self._chosen)
        return [next(one for one in replicas if one.name == name)]


async def answer(port: int, trace: list[Arrival]) -> tuple[list[Arrival], list[str]]:
    """Each request at its time; returns copies with the times at which text came, and the replicas."""

    async def one(place: int, arrival: Arrival) -> tuple[Arrival, str]:
        # No two alike: the engine would not compute the same beginning twice.
        prompt = [10 + (7 * (place + row)) % 8000 for row in range(arrival.prompt)]
        found = await real_fleet.ask(port, arrival.adapter or BASE_MODEL, arrival.output, prompt)
        if found.outcome != "ok":
            raise RuntimeError(f"a request failed: {found}")
        # From when it was sent: what the sender was late is not the fleet's.
        at = arrival.at
        done = replace(arrival, first_token=at + found.first_s, end=at + found.ended - found.began)
        return done, found.replica

    tasks, began = [], time.perf_counter()
    for place, arrival in enumerate(trace):
        await asyncio.sleep(max(0.0, began + arrival.at - time.perf_counter()))
        tasks.append(asyncio.create_task(one(place, arrival)))
    found = await asyncio.gather(*tasks)
    return [one for one, _ in found], [replica for _, replica in found]


class Past:
    """What a fleet was asked before the requests that count, at which times, for the simulation to do too.

    probe: requests for the base model one after the other; returns the seconds from the client to the engine
    and back on an idle fleet: what such a request takes beyond its step.
    """

    def __init__(self, port: int) -> None:
        self._port, self._began = port, time.perf_counter()
        self.requests: list[Arrival] = []
        self.chosen: list[str] = []

    @property
    def now(self) -> float:
        return time.perf_counter() - self._began

    def answer(self, trace: list[Arrival]) -> list[Arrival]:
        start = self.now
        self.requests += [replace(one, at=start + one.at) for one in trace]
        found, replicas = asyncio.run(answer(self._port, trace))
        self.chosen += replicas
        return found

    def probe(self, prompt: int) -> float:
        step = STRETCHED.step_s + prompt * STRETCHED.token_s
        found = [self.answer([Arrival(0.0, None, prompt, 1)])[0] for _ in range(PROBES)]
        return max(0.0, statistics.median(one.first_token for one in found) - step)


def calibrate(folder: Path, fleet: Fleet, given: argparse.Namespace) -> tuple[Fleet, float]:
    """The case with the places of a replica, as pages are whole and there may be more than --room; and
    `write_s`."""
    lora = LoraCacheConfig(
        max_lora_rank=given.rank, max_loras=given.room, max_cpu_loras=given.room,
        catalog_dir=folder / "adapters",
    )  # fmt: skip
    config = EngineConfig(folder / "model", device="cpu", max_batch_size=fleet.batch, lora=lora)
    engine = Watched(config, STRETCHED)
    loop = EngineLoop(engine)
    in_process(loop, [Arrival(0.0, "adapter-0", fleet.prompt, 2)], VOCABULARY)
    fleet = replace(fleet, **rooms(loop))
    write_s = write_seconds(loop, engine, fleet)
    loop.close()
    return fleet, write_s


def measure(
    fleet: Fleet, folder: Path, routing: str, write_s: float, given: argparse.Namespace
) -> dict[str, Any]:
    """One fleet of each kind, with one trace: what came after the warm-up."""
    trace = list(arrivals(fleet))
    warm = [one for one in trace if one.at < fleet.warm_s]
    counted = [replace(one, at=one.at - fleet.warm_s) for one in trace if one.at >= fleet.warm_s]
    running = real_fleet.Fleet(
        folder / "model", folder / "adapters", routing, given, entry=(str(Path(__file__).resolve()), SERVE)
    )
    try:
        running.wait(fleet.replicas, fleet.adapters)
        names = [one["replica"] for one in running.status(fleet.replicas)["replicas"]]
        past = Past(running.port)
        past.answer(warm)
        before = running.cold_loads(fleet.replicas)
        print("warm", flush=True)
        wait_for_quiet(given.wait)
        way_s = past.probe(fleet.prompt)
        stops, others, start = Stops(), Others(), past.now
        measured, later = asyncio.run(answer(running.port, counted))
        stopped, busy = stops.longest, others.cpus()
        loads = running.cold_loads(fleet.replicas) - before
    finally:
        running.close()
    costs = replace(STRETCHED, write_s=write_s, front_s=way_s / 2, back_s=way_s / 2)
    policy: Policy = Replayed(past.chosen + later) if routing == "random" else AffinityRouting()
    expected, expected_loads = predict(past.requests, counted, start, names, policy, costs, fleet)
    real, simulated = figures(measured, loads), figures(expected, expected_loads)
    return {
        "routing": routing,
        "rate": fleet.rate,
        "requests": len(counted),
        "stopped_s": stopped,
        "others_cpus": busy,
        "write_s": write_s,
        "way_s": way_s,
        "real": real,
        "simulated": simulated,
        "ratios": {name: simulated[name] / value for name, value in real.items() if value},
        # Of each request: when it came, for which adapter, its times to first token and its replica.
        "each": [
            (one.at, one.adapter, one.first_token - one.at, other.first_token - other.at, replica)
            for one, other, replica in zip(measured, expected, later, strict=True)
        ],
    }


def predict(
    past: list[Arrival],
    counted: list[Arrival],
    start: float,
    names: list[str],
    policy: Policy,
    costs: Costs,
    fleet: Fleet,
) -> tuple[list[Arrival], int]:
    """What the simulated fleet makes of the same: the counted requests, from `start` on, and how often an
    adapter was loaded for them."""
    clock = Clock()
    servers = {name: SimulatedServer(name, costs, fleet.shape, clock) for name in names}
    replay([replace(one) for one in past], servers, policy, clock)
    before, began = sum(one.store.num_loads for one in servers.values()), max(start, clock.now)
    later = [replace(one, at=began + one.at) for one in counted]
    replay(later, servers, policy, clock)
    return later, sum(one.store.num_loads for one in servers.values()) - before


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--routing", nargs="+", default=["random", "affinity"])
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--adapters", type=int, default=60)
    parser.add_argument("--room", type=int, default=10, help="of a replica, as --max-loras")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[1.2], help="requests a second for each replica"
    )
    parser.add_argument("--output", type=int, default=8)
    parser.add_argument("--warm-seconds", type=float, default=15.0)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--wait", type=float, default=0.0, help="so many seconds at most for a quiet machine")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    fleet = Fleet(
        replicas=given.replicas, adapters=given.adapters, seconds=given.seconds,
        warm_s=given.warm_seconds, output=given.output, batch=8,
    )  # fmt: skip
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_llama(folder / "model", 64, 2)
        for number in range(given.adapters):
            make_adapter(folder / "adapters" / f"adapter-{number}", 64, 2, given.rank, number)
        fleet, write_s = calibrate(folder, fleet, given)
        print(
            f"room for {fleet.room} adapters on the device and {fleet.host_room} on the host; "
            f"writing takes {write_s:.4f} s", flush=True,
        )  # fmt: skip
        for number, rate, routing in product(range(given.rounds), given.rates, given.routing):
            one = measure(replace(fleet, seed=number + 1, rate=rate), folder, routing, write_s, given)
            brief = {name: value for name, value in one.items() if name != "each"}
            print(f"round {number + 1}", json.dumps(brief), flush=True)
            if one["stopped_s"] > STOPPED_S:
                print(f"left out: everything stood still for {one['stopped_s']:.1f} s")
                continue
            found.append(one)
    print(see_machine())
    if given.json is not None:
        given.json.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == [SERVE]:
        serve(sys.argv[3:])  # after the word "fleet"
    else:
        main()
