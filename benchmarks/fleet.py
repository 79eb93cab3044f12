#!/usr/bin/env python3
"""Compares affinity routing with random routing, for real replicas with many adapters and small caches.

Starts one fleet per kind of routing. The fleets take turns and get the same requests at the same times, in an
open loop. The popularity of adapters follows Zipf's law. Prints how many adapters had to be loaded from their
files, and the time to first token. With --kill, a replica of the last fleet is then killed with SIGKILL under
the same load. This prints how many requests were lost (an error before the first text), cut (an error event
in the stream), or retried on another replica.

    fleet.py
    fleet.py --routing affinity --seconds 20 --kill

Needs `pip install 'manylora[fleet]'`, and a machine without other work. If this process is paused for a
second or more, the requests running at that time are excluded from the times and counted separately.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cold_loads import completion_request, make_adapter
from loads import make_llama
from machine import Others, see_machine, wait_for_quiet

TEXT = "Tell me about Japan. \nAnswer:"
START_S = 300.0
TICK_S, STOPPED_S = 0.05, 1.0


@dataclass
class Asked:
    """A request that ended. began, ended: time.perf_counter. first_s: seconds to the first text. outcome: ok,
    lost or cut."""

    began: float
    ended: float
    first_s: float
    outcome: str
    replica: str
    why: str = ""


class Fleet:
    """A running `manylora fleet`. entry: the arguments of Python that start it."""

    def __init__(
        self,
        model: Path,
        root: Path,
        routing: str,
        options: argparse.Namespace,
        entry: Sequence[str] = ("-m", "manylora.cli"),
        flags: Sequence[object] = (),
    ) -> None:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self.port = one.getsockname()[1]
        command = [sys.executable, *entry, "fleet", model, "--port", str(self.port)]
        command += ["--lora-root", root, "--replicas", str(options.replicas), "--routing", routing]
        command += ["--max-lora-rank", str(options.rank), "--max-loras", str(options.room)]
        command += ["--max-cpu-loras", str(options.room), "--device", "cpu", "--served-model-name", "model"]
        command += ["--lora-refresh-seconds", "3600", "--log-level", "warning", "--max-batch-size", "8"]
        self._process = subprocess.Popen([str(part) for part in (*command, *flags)])

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
            return answer.read().decode()

    def wait(self, replicas: int, adapters: int) -> None:
        """Wait until every replica is ready and knows every adapter."""
        read = 'state="ready",replica='
        until = time.monotonic() + START_S
        while time.monotonic() < until and self._process.poll() is None:
            try:
                lines = [line for line in self.get("/metrics").splitlines() if read in line]
                if [line.rpartition(" ")[2] for line in lines] == [str(adapters)] * replicas:
                    return
            except OSError:
                pass
            time.sleep(0.5)
        raise RuntimeError("the fleet does not start")

    def status(self, replicas: int = 0) -> dict[str, Any]:
        """Return GET /v1/cache, once at least `replicas` replicas are in it."""
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                found = json.loads(self.get("/v1/cache"))
                if len(found["replicas"]) >= replicas:
                    return found
            time.sleep(0.5)
        raise RuntimeError(f"there are no {replicas} replicas")

    def cold_loads(self, replicas: int) -> int:
        return int(self.status(replicas)["counts"]["cold_loads"])

    def retried(self) -> int:
        name = "manylora_fleet_retried_requests_total "
        return next(int(line.removeprefix(name)) for line in self.get("/metrics").splitlines() if name in line
                    and line[0] != "#")  # fmt: skip

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


async def ask(port: int, adapter: str, tokens: int, prompt: str | list[int] = TEXT) -> Asked:
    began, answer, first = time.perf_counter(), b"", 0.0
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(completion_request(adapter, tokens, prompt))
        answer = await reader.readuntil(b"data: ")
        first = time.perf_counter() - began
        answer += await reader.read()
        writer.close()
    except (OSError, asyncio.IncompleteReadError) as error:
        answer += getattr(error, "partial", b"")
    replica = answer.partition(b"x-manylora-replica: ")[2].partition(b"\r\n")[0].decode()
    if answer.startswith(b"HTTP/1.1 200") and b"[DONE]" in answer and b'"error"' not in answer:
        return Asked(began, time.perf_counter(), first, "ok", replica)
    why = answer[-300:].decode(errors="replace")
    return Asked(began, time.perf_counter(), first, "cut" if first else "lost", replica, why)


async def stops(found: list[tuple[float, float]]) -> None:
    """Append the periods in which this process was paused, as (start, end)."""
    last = time.perf_counter()
    while True:
        await asyncio.sleep(TICK_S)
        now = time.perf_counter()
        if now - last > STOPPED_S:
            found.append((last, now))
        last = now


async def paced(
    fleet: Fleet, names: list[str], per_second: float, tokens: int, kill_after: float = 0.0
) -> tuple[list[Asked], list[float]]:
    """Send requests in an open loop: the next request does not wait for the previous one. kill_after: seconds
    until a replica is killed, 0 for never.

    Returns all requests, and the sorted times to first token of those during which this process was not
    paused.
    """
    arrivals, at = random.Random(7), 0.0
    stopped: list[tuple[float, float]] = []
    watch = asyncio.create_task(stops(stopped))
    began, tasks = time.perf_counter(), []
    victim = fleet.status()["replicas"][0]["pid"] if kill_after else 0
    for name in names:
        at += arrivals.expovariate(per_second)
        await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
        if victim and at > kill_after:
            os.kill(victim, signal.SIGKILL)
            victim = 0
        tasks.append(asyncio.create_task(ask(fleet.port, name, tokens)))
    found = list(await asyncio.gather(*tasks))
    watch.cancel()
    whole = [one for one in found if not any(s < one.ended and one.began < e for s, e in stopped)]
    return found, sorted(one.first_s for one in whole)


def zipf(adapters: int, count: int, power: float, seed: int) -> list[str]:
    weights = [1 / (rank + 1) ** power for rank in range(adapters)]
    picks = random.Random(seed).choices(range(adapters), weights, k=count)
    return [f"a{pick:03}" for pick in picks]


def warm(fleet: Fleet, options: argparse.Namespace) -> None:
    names = zipf(options.adapters, int(options.per_second * options.warm_seconds), options.zipf, 1)
    asyncio.run(paced(fleet, names, options.per_second, options.tokens))


def measure(fleets: dict[str, Fleet], options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Measure the fleets in turns, so that other work on the machine affects all of them equally."""
    found: dict[str, list[Asked]] = {routing: [] for routing in fleets}
    times: dict[str, list[float]] = {routing: [] for routing in fleets}
    before = {routing: fleet.cold_loads(options.replicas) for routing, fleet in fleets.items()}
    busy = []
    for number in range(options.rounds):
        wait_for_quiet(options.wait)
        others = Others()
        count = int(options.per_second * options.seconds / options.rounds)
        names = zipf(options.adapters, count, options.zipf, 2 + number)
        for routing, fleet in fleets.items():
            some, first = asyncio.run(paced(fleet, names, options.per_second, options.tokens))
            found[routing] += some
            times[routing] += first
        busy.append(others.cpus())
        print(f"round {number + 1}: other processes used {busy[-1]:.2f} CPUs", flush=True)
    return {
        routing: summary(found[routing], times[routing])
        | {
            "cold_loads": fleet.cold_loads(options.replicas) - before[routing],
            "others_cpus": statistics.fmean(busy),
        }
        for routing, fleet in fleets.items()
    }


def summary(found: list[Asked], times: list[float]) -> dict[str, float]:
    bad = [one for one in found if one.outcome != "ok"]
    if bad:
        raise RuntimeError(f"{len(bad)} requests failed: {bad[0]}")
    times = sorted(times)
    return {
        "requests": len(found),
        "left_out": len(found) - len(times),
        "p50_ms": 1000 * statistics.median(times),
        "p90_ms": 1000 * times[int(0.90 * len(times))],
        "p99_ms": 1000 * times[int(0.99 * len(times))],
        "busiest_replica": max(Counter(one.replica for one in found).values()) / len(found),
    }


def kill(fleet: Fleet, options: argparse.Namespace) -> dict[str, float]:
    names = zipf(options.adapters, int(options.per_second * options.seconds), options.zipf, 3)
    wait_for_quiet(options.wait)
    retried, others = fleet.retried(), Others()
    found, _ = asyncio.run(
        paced(fleet, names, options.per_second, options.kill_tokens, kill_after=options.seconds / 3)
    )
    for one in found:
        if one.outcome == "lost":
            print(one)
    outcomes, busy = Counter(one.outcome for one in found), others.cpus()
    again = len(fleet.status(options.replicas)["replicas"])
    return {
        "requests": len(found),
        **{name: outcomes[name] for name in ("ok", "lost", "cut")},
        "retried": fleet.retried() - retried,
        "replicas_again": again,
        "others_cpus": busy,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--routing", nargs="+", default=["random", "affinity"])
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--adapters", type=int, default=60)
    parser.add_argument(
        "--room", type=int, default=10, help="adapters that each cache level of a replica holds"
    )
    parser.add_argument("--zipf", type=float, default=1.0, help="the exponent of Zipf's law")
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument(
        "--kill-tokens", type=int, default=40, help="tokens per answer while a replica is killed"
    )
    parser.add_argument("--per-second", type=float, default=5.0)
    parser.add_argument("--warm-seconds", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=4, help="rounds in which the fleets take turns")
    parser.add_argument(
        "--wait", type=float, default=0.0, help="wait up to so many seconds for an idle machine"
    )
    parser.add_argument("--kill", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        model = make_llama(work / "model", options.hidden, options.layers)
        for number in range(options.adapters):
            size = make_adapter(
                work / "adapters" / f"a{number:03}", options.hidden, options.layers, options.rank, number
            )
        fleets: dict[str, Fleet] = {}
        try:
            for routing in options.routing:
                fleets[routing] = Fleet(model, work / "adapters", routing, options)
                fleets[routing].wait(options.replicas, options.adapters)
                warm(fleets[routing], options)
            print("warm", flush=True)
            results |= measure(fleets, options)
            for routing in fleets:
                print(
                    routing, {name: round(value, 2) for name, value in results[routing].items()}, flush=True
                )
            if options.kill:
                results["kill"] = kill(fleets[options.routing[-1]], options)
                print("kill", results["kill"], flush=True)
        finally:
            for fleet in fleets.values():
                fleet.close()
    print(f"{size / 2**20:.1f} MiB per adapter; {see_machine()}")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
