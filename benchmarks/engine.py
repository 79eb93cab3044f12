#!/usr/bin/env python3
"""Measures the engine in-process: throughput with and without adapters, latency, memory, start-up time.

The limit. A decode step of n sequences reads all W bytes of weights once, reads the keys and values of each
sequence, and does 2 n FLOPs per weight. It takes at least the larger of bytes / bandwidth and FLOPs / rate.
Both rates are measured first (see limits.py). Each adapter adds r * sum(in + out) elements. They are read
once per distinct adapter in the batch, and each is multiplied once per sequence. One sequence per adapter is
therefore the worst case. The limit is the time that the whole load would take at these rates, with and
without adapters. Everything beyond it is overhead: calls, copies, padding, waiting. Quantisation saves bytes,
not FLOPs.

    engine.py                                           # small, bfloat16, prompts of 64, 16 concurrent
    engine.py --models small,mid --dtypes bfloat16,float32,int8,int4 --prompts 64,512 --json found.json
    engine.py --models mid --cases base,r16all-8 --load offline --at-once 1,4,16

Models, both with random weights:
    small     a Llama of 125 million parameters
    mid       a Qwen2 of 387 million parameters
    int8 and int4 are W8A16 and W4A16 of the bfloat16 model.

Load: twice as many requests as run concurrently (at least 4), each with 64 tokens of output.
    closed    a new request arrives when one ends
    offline   all requests arrive at once

Cases:
    r8qkv-N   N distinct adapters of rank 8 on q, k, v, used in turn
    r16all-N  the same of rank 16 on all linear layers
    zipf-N    as r16all-N, but the n-th adapter is used 1 / n as often as the first
    mixed-N   ranks from 4 to 64 on all linear layers
    resident  the base model, while 32 adapters are in the cache

Each setting runs in its own process. In every round each case runs once. Figures are medians over the rounds,
and ratios are ratios of medians.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import queue
import resource
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from limits import Limits, adapter_elements, kv_bytes, measure_machine
from loads import ALL, AT_ONCE, MODELS, OUTPUT, QKV, Case, numbers_to, prompts, save_model, some_of
from machine import QUIET, Others, see_machine
from peers.tables import case_words, line

from manylora.adapters.modules import MODULE_NAMES, LoraModule, lora_modules
from manylora.checkpoints.quant.config import QuantConfig
from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.engine.engine import Engine
from manylora.engine.loop import EngineLoop
from manylora.kernels.row_format import RowFormat
from manylora.request import Event, LoraInput, Request, SamplingConfig

BASE = "base"
DTYPES = {"bfloat16": None, "float32": None, "int8": "W8A16", "int4": "W4A16"}
RESIDENT = 32
NAMES = ("attn_q", "attn_k", "attn_v", "attn_dense", "mlp_gate", "mlp_h_to_4h", "mlp_4h_to_h")
IDS = dict(zip(ALL, map(MODULE_NAMES.index, NAMES), strict=True))
CASES = [
    Case(BASE),
    Case("resident", (16,), ALL),  # requests for the base model while 32 adapters are in the cache
    *(Case(f"r8qkv-{n}", (8,), QKV, n) for n in (1, 8, 32)),
    *(Case(f"r16all-{n}", (16,), ALL, n) for n in (1, 8, 32)),
    Case("zipf-32", (16,), ALL, 32, "zipf"),
    Case("mixed-32", (4, 8, 16, 32, 64), ALL, 32),
]


@dataclass(frozen=True)
class Setting:
    """One engine: a model, the dtype of its weights, the length of prompts, and concurrent requests."""

    model: str
    dtype: str
    prompt: int
    at_once: int = AT_ONCE

    @property
    def requests(self) -> int:
        return max(4, 2 * self.at_once)

    def __str__(self) -> str:
        return f"{self.model}, {self.dtype}, prompts of {self.prompt}, {self.at_once} concurrent requests"


@dataclass(frozen=True)
class Run:
    """The result of one load. rate: output tokens per second. first, gap: median seconds to the first token,
    and between two tokens."""

    rate: float
    first: float
    gap: float


def main() -> None:
    options = _options()
    machine = see_machine()
    print(machine)
    chosen = itertools.product(options.models, options.dtypes, options.prompts, options.at_once)
    with tempfile.TemporaryDirectory() as folder:
        settings = [_in_process(Setting(*one), options, Path(folder)) for one in chosen]
    found = {
        "machine": machine.as_dict(), "rounds": options.rounds, "load": options.load, "settings": settings
    }  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _in_process(setting: Setting, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure one setting in a new process, so that its memory and start-up time are its own."""
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    process = context.Process(target=_measure, args=(setting, options, folder, answers))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"{setting}: failed")
    return answers.get()


def _measure(setting: Setting, options: argparse.Namespace, folder: Path, answers: Any) -> None:
    stored = "float32" if setting.dtype == "float32" else "bfloat16"
    path = folder / f"{setting.model}-{stored}"
    if not path.exists():
        save_model(path, setting.model, stored)
    bandwidth, rate = measure_machine()
    others = Others()
    began = time.perf_counter()
    engine = _start(path, setting)
    loop = EngineLoop(engine)
    texts = [tuple(text) for text in prompts(setting.requests, setting.prompt)]
    _load(loop, texts[:1], [None], 1, 1)
    started = time.perf_counter() - began
    modules, layers = lora_modules(engine.model), engine.model.num_layers
    limits = Limits(engine.model, setting.dtype, 4 if setting.dtype == "float32" else kv_bytes(),
                    engine.adapters._pool.flat.element_size(), bandwidth, rate)  # fmt: skip
    cases = [case for case in CASES if case.name in options.cases or case.name == BASE]
    loras = {case.name: _warm(loop, case, modules, layers, setting) for case in cases}
    at_once = setting.at_once if options.load == "closed" else setting.requests
    _load(loop, texts, [None] * setting.requests, at_once, OUTPUT)
    runs: dict[str, list[Run]] = {case.name: [] for case in cases}
    for _ in range(options.rounds):
        for case in cases:
            runs[case.name].append(_load(loop, texts, loras[case.name], at_once, OUTPUT))
    loop.close()
    ideal = {case.name: _ideal(case, limits, modules, layers, setting) for case in cases}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    report = _report(setting, cases, runs, ideal)
    report |= {"bandwidth": bandwidth, "rate": rate, "start_s": started, "peak_gib": peak,
               "others_cpus": others.cpus()}  # fmt: skip
    _print(setting, report)
    answers.put(report)


def _start(path: Path, setting: Setting) -> Engine:
    algo = DTYPES[setting.dtype]
    lora = LoraCacheConfig(gpu_memory_bytes=2**31, host_memory_bytes=2**31)
    config = EngineConfig(
        path, device="cpu", max_batch_size=setting.at_once, enable_kv_cache_reuse=False, lora=lora,
        quant=None if algo is None else QuantConfig(algo),
    )  # fmt: skip
    return Engine(config)


def _adapter(case: Case, number: int, modules: dict[int, LoraModule], layers: int) -> LoraInput:
    picks = np.random.default_rng(number)
    rank = case.ranks[number % len(case.ranks)]
    rows = [(IDS[name], layer) for layer in range(layers) for name in case.modules]
    sizes = [modules[m].row_elements(RowFormat(rank)) for m, _ in rows]
    weights = np.zeros((1, len(rows), max(sizes)), np.float32)
    for i, size in enumerate(sizes):
        weights[0, i, :size] = picks.normal(0, 0.01, size)
    config = np.array([[[m, layer, rank, 0] for m, layer in rows]], np.int32)
    return LoraInput(CASES.index(case) * 1000 + number + 1, weights, config)


def _warm(
    loop: EngineLoop, case: Case, modules: dict[int, LoraModule], layers: int, setting: Setting
) -> list[LoraInput | None]:
    """Load the adapters into the cache, and return the task id to use for each request."""
    count = case.adapters or (RESIDENT if case.ranks else 0)
    tensors = [_adapter(case, n, modules, layers) for n in range(count)]
    if tensors:
        _load(loop, [(5, 6, 7)] * count, list(tensors), count, 1)
    chosen = case.choose(setting.requests)
    return [None if n is None else LoraInput(tensors[n].task_id) for n in chosen]


def _load(
    loop: EngineLoop,
    texts: list[tuple[int, ...]],
    loras: list[LoraInput | None],
    at_once: int,
    output: int,
) -> Run:
    """Run all requests, with `at_once` of them open at any time."""
    done: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def sink(event: Event) -> None:
        if event.last:
            done.put(event)

    params = SamplingConfig(max_tokens=output)
    requests = [Request(text, params, lora) for text, lora in zip(texts, loras, strict=True)]
    began = time.perf_counter()
    for request in requests[:at_once]:
        loop.submit(request, sink)
    metrics = []
    for waiting in [*requests[at_once:], *[None] * min(at_once, len(requests))]:
        event = done.get()
        if event.error is not None:
            raise event.error
        metrics.append(event.metrics)
        if waiting is not None:
            loop.submit(waiting, sink)
    seconds = time.perf_counter() - began
    return Run(
        len(requests) * output / seconds,
        statistics.median((m.first_token_ns - m.arrival_ns) / 1e9 for m in metrics),
        statistics.median((m.last_token_ns - m.first_token_ns) / 1e9 / max(1, output - 1) for m in metrics),
    )


def _ideal(
    case: Case, limits: Limits, modules: dict[int, LoraModule], layers: int, setting: Setting
) -> float:
    """Output tokens per second at the machine's limits."""
    used = [IDS[name] for name in case.modules]
    sizes = [
        adapter_elements(modules, used, case.ranks[n % len(case.ranks)], layers) for n in range(case.adapters)
    ]
    chosen = case.choose(setting.requests)
    seconds = limits.run(chosen, sizes, setting.prompt, OUTPUT, setting.at_once)
    return setting.requests * OUTPUT / seconds


def _report(
    setting: Setting, cases: list[Case], runs: dict[str, list[Run]], ideal: dict[str, float]
) -> dict[str, Any]:
    def middle(name: str, field: str) -> float:
        return statistics.median(getattr(run, field) for run in runs[name])

    base = middle(BASE, "rate")
    found = {
        case.name: {
            "tokens_per_s": middle(case.name, "rate"), "of_base": middle(case.name, "rate") / base,
            "limit": ideal[case.name] / ideal[BASE], "first_token_ms": 1000 * middle(case.name, "first"),
            "gap_ms": 1000 * middle(case.name, "gap"), "runs": [run.rate for run in runs[case.name]],
        }
        for case in cases
    }  # fmt: skip
    return {
        "model": setting.model, "dtype": setting.dtype, "prompt": setting.prompt,
        "at_once": setting.at_once, "cases": found,
        "base_of_ideal": base / ideal[BASE], "ideal_tokens_per_s": ideal[BASE],
    }  # fmt: skip


def _print(setting: Setting, report: dict[str, Any]) -> None:
    machine = f"read {report['bandwidth'] / 1e9:.1f} GB/s, GEMM {report['rate'] / 1e9:.0f} GFLOP/s"
    limit = (
        f"limit {report['ideal_tokens_per_s']:.0f} tokens/s, base reaches {report['base_of_ideal']:.2f} of it"
    )
    process = f"first token {report['start_s']:.1f} s after the start, peak {report['peak_gib']:.2f} GiB"
    print(f"\n{setting}: {machine}: {limit}; {process}")
    if report["others_cpus"] > QUIET:
        print(f"other processes used {report['others_cpus']:.2f} CPUs: figures and limit are unreliable")
    head = ["case", "tokens/s", "of base", "limit", "first token ms", "between tokens ms"]
    print("\n" + line(head) + "\n" + line(["---"] * len(head)))
    for name, case in report["cases"].items():
        rates = [f"{case['tokens_per_s']:.0f}", f"{case['of_base']:.2f}", f"{case['limit']:.2f}"]
        print(line([case_words(name), *rates, f"{case['first_token_ms']:.0f}", f"{case['gap_ms']:.1f}"]))
    print(end="", flush=True)


def _options() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    names = [case.name for case in CASES]
    parser.add_argument("--models", type=some_of(list(MODELS)), default=["small"], help=",".join(MODELS))
    parser.add_argument("--dtypes", type=some_of(list(DTYPES)), default=["bfloat16"], help=",".join(DTYPES))
    parser.add_argument(
        "--prompts",
        type=numbers_to(1024 - OUTPUT),
        default=[64],
        help="prompt lengths in tokens, such as 64,512",
    )
    parser.add_argument("--cases", type=some_of(names), default=names, help=",".join(names))
    parser.add_argument("--load", default="closed", choices=("closed", "offline"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--at-once", type=numbers_to(256), default=[AT_ONCE], help="concurrent requests, such as 1,16"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


if __name__ == "__main__":
    main()
