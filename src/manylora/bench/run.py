"""Runs one benchmark: opens the system, warms it up, sends the load, and creates the report."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import manylora
from manylora.bench.datasets import BenchRequest, adapters_of, read_dataset, spread, with_adapters
from manylora.bench.load import Record, Sample, run_load
from manylora.bench.options import BenchOptions
from manylora.bench.report import dataset_details, issue_rate, measure, tier_figures
from manylora.bench.system import SystemUnderTest, open_system
from manylora.errors import ConfigError
from manylora.llmapi.lora import LoRARequest
from manylora.stats import AdapterStats, EngineStats

CACHE_COUNTERS = (
    "host_stores", "host_evictions", "device_loads", "device_evictions", "host_adapters", "device_adapters",
)  # fmt: skip
THROUGHPUT = "system_output_throughput_tok_s"


@dataclass(frozen=True)
class BenchResult:
    """records, samples: of the last run with adapters."""

    report: dict[str, Any]
    records: list[Record]
    samples: list[Sample]


def run_bench(options: BenchOptions) -> BenchResult:
    """Raises ConfigError for options that cannot be used, ValueError if no request was answered."""
    requests = read_dataset(options.dataset, options.num_requests)
    loads = _assign_adapters(options, requests)
    with ExitStack() as stack:
        system = open_system(options, requests, stack)
        bare = with_adapters(requests, [None] * len(requests))
        asyncio.run(run_load(system.target, bare[: options.warmup], concurrency=options.concurrency))
        sweep: list[dict[str, Any]] = []
        for load in loads:
            before = system.cache()
            records, samples = system.run(load, options)
            done = measure(records, streaming=options.streaming)
            sweep.append(
                {"num_adapters": len(adapters_of(load)), THROUGHPUT: done["performance"][THROUGHPUT]}
            )
        adapters = {
            "num_distinct": len(adapters_of(loads[-1])),
            "num_requests": sum(request.lora is not None for request in loads[-1]),
            "popularity": options.popularity,
            "tiers": tier_figures(records),
            "cache": _difference(before, system.cache()),
            "ratio": None,
            "sweep": sweep if len(sweep) > 1 else None,
        }
        if options.compare_base and adapters["num_distinct"]:
            plain, _ = system.run(bare, options)
            base = measure(plain, streaming=options.streaming)["performance"][THROUGHPUT]
            ratio = done["performance"][THROUGHPUT] / base
            adapters["ratio"] = {"measured": ratio} | system.ideal_ratio(loads[-1], samples)
        decoding = _decoding(samples[-1][1] if samples else EngineStats())
        report = _report(options, system, done, records) | {"adapters": adapters, "decoding_stats": decoding}
    return BenchResult(report, records, samples)


def _assign_adapters(options: BenchOptions, requests: list[BenchRequest]) -> list[list[BenchRequest]]:
    """The dataset with adapters assigned according to the options, once for each number of adapters."""
    if not (options.popularity or options.num_adapters or options.lora_dir):
        return [requests]
    pool: list[LoRARequest] = adapters_of(requests)
    if options.lora_dir is not None:
        try:
            folders = sorted(path for path in options.lora_dir.iterdir() if path.is_dir())
        except OSError as error:
            raise ConfigError(f"--lora_dir {options.lora_dir} cannot be read: {error.strerror}") from error
        pool = [LoRARequest(path.name, number, str(path)) for number, path in enumerate(folders)]
    numbers = options.num_adapters or (len(pool),)
    if not pool or max(numbers) > len(pool) or min(numbers) < 0:
        raise ConfigError(
            f"--num_adapters: there are {len(pool)} adapters in "
            f"{'--lora_dir' if options.lora_dir else 'the dataset'}"
        )
    loads = []
    for number in numbers:
        chosen: list[LoRARequest | None] = [None] * len(requests)
        if number:
            shape = options.popularity or "uniform"
            chosen = list(spread(shape, pool[:number], len(requests), random.Random(options.seed)))
        loads.append(with_adapters(requests, chosen))
    return loads


def _difference(before: AdapterStats | None, after: AdapterStats | None) -> dict[str, int] | None:
    """Counters of the run, and the number of adapters in the cache afterwards."""
    if before is None or after is None:
        return None
    found = {name: getattr(after, name) for name in CACHE_COUNTERS}
    for name in CACHE_COUNTERS:
        if not name.endswith("_adapters"):
            found[name] -= getattr(before, name)
    return found


def _decoding(stats: EngineStats) -> dict[str, Any] | None:
    """Draft statistics since the engine's start. None: no drafts, or the engine runs elsewhere."""
    if not stats.draft_tokens:
        return None
    drafted, accepted = stats.draft_tokens, stats.accepted_draft_tokens
    return {
        "num_draft_tokens": drafted,
        "num_accepted_draft_tokens": accepted,
        "draft_acceptance_rate": accepted / drafted,
        "acceptance_length": 1 + accepted / stats.drafts,  # tokens per step with a draft
    }


def _report(
    options: BenchOptions, system: SystemUnderTest, done: dict[str, Any], records: Sequence[Record]
) -> dict[str, Any]:
    device = {name: value for name, value in system.facts.items() if name == "device"}
    return {
        "engine": {
            "model": options.model,
            "model_path": str(options.model_dir) if options.model_dir else None,
            "backend": "pytorch",
            "version": manylora.__version__,
            **system.facts["engine"],
        },
        "machine": {"name": _cpu_name(), **device, "memory": _memory_gib(), "cores": os.cpu_count()},
        "world_info": {
            "tp_size": 1, "pp_size": 1, "ep_size": 1, "world_size": 1, **system.facts.get("world", {}),
            "issue_rate": issue_rate(records),
        },
        **done,
        "dataset": {"path": str(options.dataset), **dataset_details(records)},
    }  # fmt: skip


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
