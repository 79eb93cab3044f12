#!/usr/bin/env python3
"""Compares a real fleet with the simulated one.

    fleet_compare.py --rates 0.8 1.2 1.6 --json compared.json

The same arrivals go to a `manylora fleet` on Ray and, in simulated time, to replicas with the same names, so
that adapters have the same homes. Sleeping makes the steps and loads of a tiny model last known times, as in
fleet_calibrate.py. This compares everything else: routing and its status reports, the HTTP endpoint, Ray, and
the engines' threads and caches.

Two times are measured in advance: `write_s` on an idle engine, and the latency to the engine and back on the
idle fleet. The latency comes from requests for the base model, one after the other, and half of it is added
in each direction. A new fleet is started for each rate and routing, and the first arrivals only warm it up.
The simulation of random routing repeats the choices of the real fleet. Needs `pip install 'manylora[fleet]'`.
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
    """Run `manylora fleet` with these arguments, but with stretched engines in its replicas."""
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
    """Repeats the choices of a measured run. chosen: the replica of each request, in order."""

    def __init__(self, chosen: list[str]) -> None:
        super().__init__()
        self._chosen = iter(chosen)

    def choose(
        self, adapter: str | None, replicas: Sequence[Replica], now: float, limit: int | None = None
    ) -> list[Replica]:
        name = next(self._chosen)
        return [next(one for one in replicas if one.name == name)]


async def answer(port: int, trace: list[Arrival]) -> tuple[list[Arrival], list[str]]:
    """Send each request at its time. Returns copies with the times of their texts, and their replicas."""

    async def one(place: int, arrival: Arrival) -> tuple[Arrival, str]:
        # Every prompt is different, because the engine reuses the KV cache of a common prefix.
        prompt = [10 + (7 * (place + row)) % 8000 for row in range(arrival.prompt)]
        found = await real_fleet.ask(port, arrival.adapter or BASE_MODEL, arrival.output, prompt)
        if found.outcome != "ok":
            raise RuntimeError(f"a request failed: {found}")
        # Count from when the request was sent, because a delay of this process is not the fleet's.
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
    """Records the requests before the counted ones and their times, so that the simulation can repeat
    them."""

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
        """Send requests for the base model one after the other, on an idle fleet. Returns the median seconds
        that they take besides their step: from the client to the engine and back."""
        step = STRETCHED.step_s + prompt * STRETCHED.token_s
        found = [self.answer([Arrival(0.0, None, prompt, 1)])[0] for _ in range(PROBES)]
        return max(0.0, statistics.median(one.first_token for one in found) - step)


def calibrate(folder: Path, fleet: Fleet, given: argparse.Namespace) -> tuple[Fleet, float]:
    """Returns the case with the number of adapters that a replica really holds, and `write_s`. As pages are
    whole, a replica may hold more than --room."""
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
    """Run one trace on a real fleet and on a simulated one. Returns the figures after the warm-up."""
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
        # For each request: arrival, adapter, time to first token (real, simulated), replica.
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
    """Simulate a fleet that first answers `past`, then, from `start` on, the counted requests. Returns the
    counted requests with their times, and the number of adapters that were loaded for them."""
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
    parser.add_argument("--room", type=int, default=10, help="adapters that a replica holds (--max-loras)")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[1.2], help="requests per second and replica"
    )
    parser.add_argument("--output", type=int, default=8)
    parser.add_argument("--warm-seconds", type=float, default=15.0)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--wait", type=float, default=0.0, help="wait up to so many seconds for an idle machine"
    )
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
                print(f"does not count: the process was paused for {one['stopped_s']:.1f} s")
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
