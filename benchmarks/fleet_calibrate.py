#!/usr/bin/env python3
"""Measures how long steps and loads of the engine take here, and compares the simulation with the engine.

Runs one engine in this process, with fewer places for adapters than there are adapters. Each round has two
traces of requests. The costs are fitted to the first. The second is answered by the engine and by the
simulation. The simulation runs with two sets of costs:

    simulated  fitted to the first trace
    same       fitted to the second trace itself; shows the simulation's own error where other work on the
               machine changes its speed between the traces

    fleet_calibrate.py --rounds 5 --json costs.json      a Llama of 125 million parameters
    fleet_calibrate.py --hidden 64 --layers 2 --stretch --rate 1.2 --output 8 --seconds 60

With --stretch, sleeping makes the steps and loads of a tiny model last known times. That compares everything
except the arithmetic (threads, scheduler, caches), even on a busy machine. Use the costs with
`fleet_simulation.py --costs costs.json`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from cold_loads import make_adapter
from fleet_simulation import Fleet, arrivals
from loads import make_llama
from simulated_server import Arrival, Clock, Costs, SimulatedServer

from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.engine.engine import Engine
from manylora.engine.loop import EngineLoop
from manylora.request import Event, LoraInput, Request, SamplingConfig

# write_s is measured. It cannot be stretched, because the engine does not wait for it.
STRETCHED = Costs(step_s=0.1, token_s=0.002, row_s=0.004, adapter_s=0.005, read_s=0.4, write_s=0.0)
STOPPED_S = 0.5
Row = tuple[float, int, int, int]  # seconds, prompt rows, decode rows, adapters


class Watched(Engine):
    """An engine that records the rows and duration of each step, and how long each adapter was read."""

    def __init__(self, config: EngineConfig, least: Costs | None = None) -> None:
        self.rows: list[Row] = []
        self.reads: list[float] = []
        self.least = least  # the minimum seconds of steps and reads
        super().__init__(config)

    def step(self) -> Any:
        began = time.perf_counter()
        events = super().step()
        chunks = self._last_step.chunks
        prompt = sum(chunk.num_rows for chunk in chunks if chunk.count > 1)
        adapters = {chunk.sequence.lease.digest for chunk in chunks if chunk.sequence.lease is not None}
        row = prompt, sum(chunk.count == 1 for chunk in chunks), len(adapters)
        if self.least is not None:
            time.sleep(max(0.0, began + self.least.of(self._last_step) - time.perf_counter()))
        self.rows.append((time.perf_counter() - began, *row))
        return events

    def prepare(self, request: Request, matcher: Any = None) -> Any:
        began = time.perf_counter()
        prepared = super().prepare(request, matcher)
        if any(one is not None for one in prepared.adapters):
            if self.least is not None:
                time.sleep(max(0.0, began + self.least.read_s - time.perf_counter()))
            self.reads.append(time.perf_counter() - began)
        return prepared

    @property
    def num_loads(self) -> int:
        return self.adapters.stats().host_stores


class Stops:
    """longest: the longest time, in seconds, for which this process was paused since the last `reset`."""

    def __init__(self) -> None:
        self.longest = 0.0
        threading.Thread(target=self._watch, daemon=True).start()

    def reset(self) -> None:
        self.longest = 0.0

    def _watch(self) -> None:
        while True:
            began = time.perf_counter()
            time.sleep(0.02)
            self.longest = max(self.longest, time.perf_counter() - began)


def answer(loop: EngineLoop, trace: list[Arrival], vocabulary: int) -> list[Arrival]:
    """Send each request at its time. Returns copies with the times at which tokens arrived."""
    found = [replace(one, first_token=-1.0, end=-1.0) for one in trace]
    left, done = len(found), threading.Event()
    picks = random.Random(3)
    began = time.perf_counter()

    def sink(place: int, event: Event) -> None:
        nonlocal left
        now = time.perf_counter() - began
        if event.error is not None:
            print("failed:", event.error)
        if found[place].first_token < 0:
            found[place].first_token = now
        if event.last:
            found[place].end = now
            left -= 1
            if not left:
                done.set()

    for place, one in enumerate(found):
        prompt = tuple(picks.randrange(10, vocabulary) for _ in range(one.prompt))
        lora = None if one.adapter is None else LoraInput(None, name=one.adapter)
        time.sleep(max(0.0, one.at - (time.perf_counter() - began)))
        request = Request(prompt, SamplingConfig(max_tokens=one.output), lora, streaming=True)
        loop.submit(request, lambda event, place=place: sink(place, event))
    done.wait()
    return found


def fit(rows: list[Row]) -> tuple[float, float, float, float]:
    """Fit step_s, token_s, row_s, adapter_s by least squares, without the worst 10 % (waits, other work)."""
    data = np.array([row for row in rows if row[1] + row[2]])
    keep = np.ones(len(data), bool)
    for _ in range(5):
        table = np.column_stack([np.ones(keep.sum()), data[keep, 1:]])
        found = np.linalg.lstsq(table, data[keep, 0], rcond=None)[0].clip(0.0)
        away = np.abs(np.column_stack([np.ones(len(data)), data[:, 1:]]) @ found - data[:, 0])
        keep = away <= np.quantile(away, 0.9)
    scale = data[:, 0].sum() / (np.column_stack([np.ones(len(data)), data[:, 1:]]) @ found).sum()
    step, token, row, adapter = (float(value * scale) for value in found)
    return step, token, row, adapter


def write_seconds(loop: EngineLoop, engine: Watched, fleet: Fleet) -> float:
    """The extra time to first token of a cold adapter on an idle engine, without the time of reading."""
    waits = []
    for number in range(12):
        name = f"adapter-{(7 * number) % fleet.adapters}"
        loads, reads = engine.num_loads, len(engine.reads)
        times = []
        for _ in range(2):
            (found,) = answer(loop, [Arrival(0.0, name, fleet.prompt, 1)], 8192)
            times.append(found.first_token)
        if engine.num_loads > loads and len(engine.reads) > reads:
            waits.append(times[0] - times[1] - engine.reads[reads])
    return max(0.0, statistics.median(waits)) if waits else 0.0


def figures(trace: list[Arrival], loads: int) -> dict[str, float]:
    times = [one.first_token - one.at for one in trace]
    tokens = sum(one.output for one in trace)
    return {
        "loads": loads,
        "tokens_per_s": tokens / (max(one.end for one in trace) - trace[0].at),
        "ttft_mean": statistics.fmean(times),
        "ttft_p50": float(np.quantile(times, 0.5)),
        "ttft_p90": float(np.quantile(times, 0.9)),
        "seconds_per_request": statistics.fmean(one.end - one.at for one in trace),
    }


def rooms(loop: EngineLoop) -> dict[str, int]:
    """How many adapters each level can hold, given that one adapter is in the cache and all have its size."""
    stats = loop.stats().adapters
    host, device = stats.host_pages - stats.host_pages_free, stats.device_pages - stats.device_pages_free
    return {"room": stats.device_pages // device, "host_room": stats.host_pages // host}


def one_round(loop: EngineLoop, engine: Watched, fleet: Fleet, seed: int) -> dict[str, Any]:
    """Fit on one trace, compare on the next. Engine and simulation keep their caches between the two."""
    first, second = (list(arrivals(replace(fleet, seed=2 * seed + i))) for i in (0, 1))
    engine.rows.clear()
    engine.reads.clear()
    write_s = write_seconds(loop, engine, fleet)
    engine.rows.clear()
    engine.reads.clear()
    answer(loop, first, 8192)
    costs = Costs(*fit(engine.rows), statistics.fmean(engine.reads), write_s)
    engine.rows.clear()
    engine.reads.clear()
    before = engine.num_loads
    real = figures(answer(loop, second, 8192), engine.num_loads - before)
    same = Costs(*fit(engine.rows), statistics.fmean(engine.reads), write_s)
    if engine.least is not None:
        costs = replace(engine.least, write_s=write_s)
    found: dict[str, Any] = {"costs": asdict(costs), "real": real}
    for name, prices in (("simulated", costs), ("same", same)):
        found[name] = predict(first, second, prices, fleet)
        found[f"{name}_ratios"] = {key: found[name][key] / real[key] for key in real if real[key]}
    return found


def predict(first: list[Arrival], second: list[Arrival], costs: Costs, fleet: Fleet) -> dict[str, float]:
    """Simulate the second trace on a server that has answered the first."""
    clock = Clock()
    server = SimulatedServer("one", costs, fleet.shape, clock)
    for one in first:
        clock.at(one.at, server.arrive, replace(one))
    clock.run()
    before, began = server.store.num_loads, clock.now
    later = [replace(one, at=began + one.at) for one in second]
    for one in later:
        clock.at(one.at, server.arrive, one)
    clock.run()
    return figures(later, server.store.num_loads - before)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=30)
    parser.add_argument("--room", type=int, default=10)
    parser.add_argument("--rate", type=float, default=2.0)
    parser.add_argument("--output", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=30.0, help="length of each of a round's two traces")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stretch", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    fleet = Fleet(
        replicas=1, adapters=given.adapters, rate=given.rate, seconds=given.seconds, warm_s=0.0,
        output=given.output, room=given.room, host_room=given.room,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        model = make_llama(work / "model", given.hidden, given.layers)
        for number in range(given.adapters):
            path = work / "adapters" / f"adapter-{number}"
            size = make_adapter(path, given.hidden, given.layers, given.rank, number)
        lora = LoraCacheConfig(
            max_lora_rank=given.rank, max_loras=given.room, max_cpu_loras=given.room,
            catalog_dir=work / "adapters",
        )  # fmt: skip
        least = STRETCHED if given.stretch else None
        config = EngineConfig(
            model, device="cpu", max_batch_size=fleet.batch, lora=lora, enable_overlap=False
        )
        engine = Watched(config, least)
        loop = EngineLoop(engine)
        answer(loop, [Arrival(0.0, "adapter-0", fleet.prompt, 4)], 8192)
        fleet = replace(fleet, **rooms(loop))
        print(f"room for {fleet.room} adapters on the device and {fleet.host_room} on the host")
        found: list[dict[str, Any]] = []
        stops = Stops()
        for number in range(given.rounds):
            stops.reset()
            one = one_round(loop, engine, fleet, number)
            if stops.longest > STOPPED_S:
                print(f"round {number + 1} does not count: the process was paused for {stops.longest:.1f} s")
                continue
            found.append(one)
            for side in ("simulated", "same"):
                ratios = found[-1][f"{side}_ratios"].items()
                print(f"round {number + 1}, {side}:", *(f"{k} {v:.2f}" for k, v in ratios), flush=True)
        loop.close()
    if not found:
        raise SystemExit("the process was paused in every round")
    middle = {name: statistics.median(one["costs"][name] for one in found) for name in found[0]["costs"]}
    print(f"adapters of {size / 2**20:.1f} MiB; costs:", json.dumps(middle))
    for side in ("real", "simulated", "simulated_ratios", "same", "same_ratios"):
        names = found[0][side]
        print(side, *(f"{k} {statistics.median(o[side].get(k, 1.0) for o in found):.4f}" for k in names))
    if given.json is not None:
        given.json.write_text(json.dumps({"costs": middle, "rounds": found}), encoding="utf-8")


if __name__ == "__main__":
    main()
