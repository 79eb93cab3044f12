#!/usr/bin/env python3
"""A real fleet beside the simulated one: the same arrivals to `manylora fleet` on a real Ray, and in
simulated time to replicas of the same names, so that adapters have the same homes.

    fleet_compare.py --rounds 2 --json compared.json

Steps and loads of a tiny model are stretched to known times by sleeping, as in fleet_calibrate.py: what is
compared is the routing with its reports, the endpoint, Ray, and the engines' threads and caches. Each round
starts a new fleet, for random and for affinity routing; the first arrivals only warm it up. Needs
`pip install 'manylora[fleet]'`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import fleet as real_fleet
import numpy as np
from cold_loads import make_adapter
from fleet_calibrate import STOPPED_S, STRETCHED, Stops, Watched, rooms
from fleet_calibrate import answer as in_process
from fleet_policies import Policy, RandomChoice
from fleet_simulation import Fleet, arrivals, replay
from loads import make_llama
from machine import see_machine
from simulated_server import Arrival, Clock, SimulatedServer

from manylora.commands.fleet import close_ray
from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.engine.loop import EngineLoop
from manylora.fleet.options import parse_options
from manylora.fleet.routing import AffinityRouting

SERVE = "--serve-stretched"
VOCABULARY = 8192


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


async def answer(port: int, trace: list[Arrival]) -> list[Arrival]:
    """Each request at its time; returns copies with the times at which text came."""

    async def one(arrival: Arrival) -> Arrival:
        assert arrival.adapter is not None
        prompt = [10 + (7 * place) % 8000 for place in range(arrival.prompt)]
        found = await real_fleet.ask(port, arrival.adapter, arrival.output, prompt)
        if found.outcome != "ok":
            raise RuntimeError(f"a request failed: {found}")
        # From when it was sent: what the sender was late is not the fleet's.
        at = arrival.at
        return replace(arrival, first_token=at + found.first_s, end=at + found.ended - found.began)

    tasks, began = [], time.perf_counter()
    for arrival in trace:
        await asyncio.sleep(max(0.0, began + arrival.at - time.perf_counter()))
        tasks.append(asyncio.create_task(one(arrival)))
    return list(await asyncio.gather(*tasks))


def places(folder: Path, given: argparse.Namespace) -> dict[str, int]:
    """Of the adapters on each level of a replica: pages are whole, so there may be more than --room."""
    lora = LoraCacheConfig(
        max_lora_rank=given.rank, max_loras=given.room, max_cpu_loras=given.room,
        catalog_dir=folder / "adapters",
    )  # fmt: skip
    loop = EngineLoop(Watched(EngineConfig(folder / "model", device="cpu", max_batch_size=8, lora=lora)))
    in_process(loop, [Arrival(0.0, "adapter-0", 32, 2)], VOCABULARY)
    found = rooms(loop)
    loop.close()
    return found


def measure(fleet: Fleet, folder: Path, routing: str, given: argparse.Namespace) -> dict[str, Any]:
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
        asyncio.run(answer(running.port, warm))
        before = running.cold_loads(fleet.replicas)
        stops = Stops()
        measured = asyncio.run(answer(running.port, counted))
        stopped = stops.longest
        loads = running.cold_loads(fleet.replicas) - before
    finally:
        running.close()
    simulated = predict(warm, counted, names, routing, fleet)
    real = figures(measured, loads)
    return {
        "routing": routing,
        "requests": len(counted),
        "stopped_s": stopped,
        "busy": os.getloadavg()[0],
        "real": real,
        "simulated": simulated,
        "ratios": {name: simulated[name] / value for name, value in real.items() if value},
    }


def predict(
    warm: list[Arrival], counted: list[Arrival], names: list[str], routing: str, fleet: Fleet
) -> dict[str, float]:
    """What the simulated fleet makes of the same: the counted requests, after the warm-up has ended."""
    clock = Clock()
    servers = {name: SimulatedServer(name, STRETCHED, fleet.shape, clock) for name in names}
    policy: Policy = RandomChoice() if routing == "random" else AffinityRouting()
    replay([replace(one) for one in warm], servers, policy, clock)
    before, began = sum(one.store.num_loads for one in servers.values()), clock.now
    later = [replace(one, at=began + one.at) for one in counted]
    replay(later, servers, policy, clock)
    return figures(later, sum(one.store.num_loads for one in servers.values()) - before)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--routing", nargs="+", default=["random", "affinity"])
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--adapters", type=int, default=60)
    parser.add_argument("--room", type=int, default=10, help="of a replica, as --max-loras")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rate", type=float, default=1.2, help="requests a second for each replica")
    parser.add_argument("--output", type=int, default=8)
    parser.add_argument("--warm-seconds", type=float, default=15.0)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    fleet = Fleet(
        replicas=given.replicas, adapters=given.adapters, rate=given.rate, seconds=given.seconds,
        warm_s=given.warm_seconds, output=given.output, batch=8,
    )  # fmt: skip
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_llama(folder / "model", 64, 2)
        for number in range(given.adapters):
            make_adapter(folder / "adapters" / f"adapter-{number}", 64, 2, given.rank, number)
        fleet = replace(fleet, **places(folder, given))
        print(f"room for {fleet.room} adapters on the device and {fleet.host_room} on the host", flush=True)
        for number in range(given.rounds):
            for routing in given.routing:
                one = measure(replace(fleet, seed=number + 1), folder, routing, given)
                print(f"round {number + 1}", json.dumps(one), flush=True)
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
