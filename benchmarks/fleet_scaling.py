#!/usr/bin/env python3
"""Tests autoscaling: whether requests and adapters survive when replicas are added and removed.

The fleet starts with one replica and may grow to three (--most). Many clients send requests in a closed loop:
each sends its next request when it has its answer. Then a single client does, until one replica is left. At
the end every adapter is used once. Prints the number of replicas over time, how many requests were answered,
lost (an error before the first text) or cut, and which replicas answered.

    fleet_scaling.py --clients 16 --tokens 8

Needs `pip install 'manylora[fleet]'`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from cold_loads import make_adapter
from fleet import START_S, Asked, Fleet, ask
from loads import make_llama
from machine import Others, see_machine

LOOK_S = 2.0


async def replicas(fleet: Fleet) -> int:
    """The number of replicas that answer. Each call sends a request to every replica, so call it rarely."""
    return len((await asyncio.to_thread(fleet.status))["replicas"])


async def run(fleet: Fleet, options: argparse.Namespace) -> tuple[list[Asked], list[tuple[float, int]]]:
    """Returns all requests, and the number of replicas over time as (seconds since the start, number)."""
    found: list[Asked] = []
    seen: list[tuple[float, int]] = []
    began, wanted = time.perf_counter(), options.clients

    async def client(number: int) -> None:
        chosen = random.Random(number)
        while number < wanted:
            adapter = f"a{chosen.randrange(options.adapters):03}"
            found.append(await ask(fleet.port, adapter, options.tokens))

    async def look() -> int:
        count, at = await replicas(fleet), time.perf_counter() - began
        if not seen or seen[-1][1] != count:
            seen.append((round(at, 1), count))
            print(f"{at:5.0f} s: {count} replicas, {len(found)} requests answered", flush=True)
        return count

    clients = [asyncio.create_task(client(number)) for number in range(options.clients)]
    while await look() < options.most and time.perf_counter() - began < options.seconds:
        await asyncio.sleep(LOOK_S)
    await asyncio.sleep(options.stay)
    wanted, until = 1, time.perf_counter() + START_S
    print(f"{time.perf_counter() - began:5.0f} s: 1 client", flush=True)
    while await look() > 1 and time.perf_counter() < until:
        await asyncio.sleep(LOOK_S)
    wanted = 0
    await asyncio.gather(*clients)
    return found, seen


async def each(fleet: Fleet, options: argparse.Namespace) -> list[Asked]:
    return [await ask(fleet.port, f"a{number:03}", 1) for number in range(options.adapters)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--most", type=int, default=3, help="maximum number of replicas")
    parser.add_argument("--target", type=float, default=4, help="target number of requests per replica")
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=180.0, help="maximum wait until all replicas run")
    parser.add_argument("--stay", type=float, default=15.0, help="seconds of full load after that")
    parser.add_argument(
        "--upscale", type=float, default=2.0, help="seconds of load before a replica is added"
    )
    parser.add_argument("--downscale", type=float, default=10.0, help="seconds before a replica is removed")
    parser.add_argument("--adapters", type=int, default=12)
    parser.add_argument("--room", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rank", type=int, default=16)
    options = parser.parse_args()
    options.replicas = 1
    flags = ["--max-replicas", options.most, "--target-requests", options.target, "--replica-cpus", 1]
    flags += ["--upscale-delay", options.upscale, "--downscale-delay", options.downscale]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        model = make_llama(work / "model", options.hidden, options.layers)
        sizes: list[Any] = [options.hidden, options.layers, options.rank]
        for number in range(options.adapters):
            make_adapter(work / "adapters" / f"a{number:03}", *sizes, number)
        fleet, others = Fleet(model, work / "adapters", "affinity", options, flags=flags), Others()
        try:
            fleet.wait(1, options.adapters)
            found, seen = asyncio.run(run(fleet, options))
            last = asyncio.run(each(fleet, options))
        finally:
            fleet.close()
    outcomes = Counter(one.outcome for one in [*found, *last])
    result = {
        "requests": len(found) + len(last),
        **{name: outcomes[name] for name in ("ok", "lost", "cut")},
        "answered_by": dict(Counter(one.replica for one in found)),
        "then": dict(Counter(one.replica for one in last)),
        "replicas": seen,
        "others_cpus": round(others.cpus(), 2),
    }
    for one in found:
        if one.outcome != "ok":
            print(one)
    print(see_machine())
    print(json.dumps(result))


if __name__ == "__main__":
    main()
