"""One benchmark: open the target, warm it up, load it, and put the report together."""

from __future__ import annotations

import asyncio
import importlib
import os
import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import manylora
from manylora.bench.datasets import BenchRequest, adapters_of, read_dataset, with_adapters
from manylora.bench.load import Record, Sample, Target, poisson_arrivals, run_load
from manylora.bench.popularity import spread
from manylora.bench.report import Performance, dataset_details, measure, tier_figures
from manylora.errors import ConfigError
from manylora.llmapi.lora import LoRARequest
from manylora.stats import AdapterStats

__all__ = ["BenchOptions", "Outcome", "run_bench"]

CACHE_COUNTERS = (
    "host_stores", "host_evictions", "device_loads", "device_evictions", "host_adapters", "device_adapters",
)  # fmt: skip
# Fields of SamplingParams that a server is told, under which name and type.
WIRE = {
    "end_id": ("end_id", np.int32),
    "temperature": ("temperature", np.float32),
    "top_k": ("runtime_top_k", np.int32),
    "top_p": ("runtime_top_p", np.float32),
    "seed": ("random_seed", np.uint64),
}


@dataclass(frozen=True)
class BenchOptions:
    """model_dir: a Hugging Face directory; None only with an endpoint. llm: arguments of `LLM`.

    sampling: fields of SamplingParams for every request. concurrency: 0 is no limit. request_rate: of an open
    loop, in requests a second; None: a closed one. popularity, num_adapters: share the adapters out anew, of
    lora_dir's directories or else of the dataset's, once for each number. compare_base: again without any.
    """

    model: str
    model_dir: Path | None
    dataset: Path
    llm: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    endpoint: str | None = None
    num_requests: int = 0
    warmup: int = 2
    concurrency: int = 0
    streaming: bool = False
    request_rate: float | None = None
    popularity: str | None = None
    num_adapters: tuple[int, ...] = ()
    lora_dir: Path | None = None
    compare_base: bool = False
    keep_text: bool = False
    seed: int = 420
    progress: bool = True


@dataclass(frozen=True)
class Outcome:
    """records and samples: of the last run with the adapters asked for."""

    report: dict[str, Any]
    records: list[Record]
    samples: list[Sample]


def run_bench(options: BenchOptions) -> Outcome:
    """Raises ConfigError for what cannot be run, ValueError when nothing was answered."""
    requests = read_dataset(options.dataset, options.num_requests)
    loads = _share_out(options, requests)
    with ExitStack() as stack:
        side: _Side = _Server(options, stack) if options.endpoint else _InProcess(options, requests, stack)
        bare = with_adapters(requests, [None] * len(requests))
        asyncio.run(run_load(side.target, bare[: options.warmup], concurrency=options.concurrency))
        sweep: list[dict[str, Any]] = []
        for load in loads:
            before = side.cache()
            records, samples = side.run(load, options)
            done = measure(records, streaming=options.streaming)
            throughput = done.system_output_throughput_tok_s
            sweep.append(
                {"num_adapters": len(adapters_of(load)), "system_output_throughput_tok_s": throughput}
            )
        adapters = {
            "num_distinct": len(adapters_of(loads[-1])),
            "num_requests": sum(request.lora is not None for request in loads[-1]),
            "popularity": options.popularity,
            "tiers": tier_figures(records),
            "cache": _difference(before, side.cache()),
            "ratio": None,
            "sweep": sweep if len(sweep) > 1 else None,
        }
        if options.compare_base and adapters["num_distinct"]:
            plain, _ = side.run(bare, options)
            base = measure(plain, streaming=options.streaming).system_output_throughput_tok_s
            adapters["ratio"] = {"measured": throughput / base} | side.ideal(loads[-1], samples)
        report = _report(options, side, done, records) | {"adapters": adapters}
    return Outcome(report, records, samples)


class _Side:
    """A target, and what is known of it."""

    target: Target

    def run(self, requests: list[BenchRequest], options: BenchOptions) -> tuple[list[Record], list[Sample]]:
        return _load(self.target, requests, options), []

    def cache(self) -> AdapterStats | None:
        return None

    def ideal(self, requests: Sequence[BenchRequest], samples: Sequence[Sample]) -> dict[str, Any]:
        return {"ideal": None}

    def engine(self) -> dict[str, Any]:
        raise NotImplementedError

    def world(self) -> dict[str, Any]:
        return {}

    def device(self) -> dict[str, Any]:
        return {}


class _InProcess(_Side):
    def __init__(self, options: BenchOptions, requests: list[BenchRequest], stack: ExitStack) -> None:
        from manylora.bench import local

        assert options.model_dir is not None
        needs_tokenizer = options.keep_text or any(r.input_ids is None for r in requests)
        wants_adapters = any(r.lora for r in requests) or options.lora_dir is not None
        self._model_dir, self._local = options.model_dir, local
        self._llm, self._about = local.open_llm(
            options.model_dir, options.llm, needs_tokenizer, wants_adapters
        )
        stack.enter_context(self._llm)
        self.target = local.LocalTarget(self._llm, options.streaming, options.sampling)

    def run(self, requests: list[BenchRequest], options: BenchOptions) -> tuple[list[Record], list[Sample]]:
        with self._local.Sampler(self._llm) as sampler:
            return _load(self.target, requests, options), sampler.samples

    def cache(self) -> AdapterStats | None:
        return self._llm.stats().adapters

    def ideal(self, requests: Sequence[BenchRequest], samples: Sequence[Sample]) -> dict[str, Any]:
        from manylora.bench.ideal import adapter_elements, mean_traffic

        elements = adapter_elements(adapters_of(requests), self._model_dir)
        traffic = mean_traffic(samples, elements * self._about["element_bytes"])
        if traffic is None:
            return {"ideal": None}
        return {"ideal": traffic.ideal_ratio, "adapters_in_batch": traffic.adapters_in_batch}

    def engine(self) -> dict[str, Any]:
        return self._about["engine"]

    def world(self) -> dict[str, Any]:
        return self._about["world"]

    def device(self) -> dict[str, Any]:
        return {"device": self._about["device"]}


class _Server(_Side):
    def __init__(self, options: BenchOptions, stack: ExitStack) -> None:
        from manylora.bench.endpoint import EndpointTarget
        from manylora.text import Tokenizer

        unknown = [name for name in options.sampling if name not in WIRE and name != "ignore_eos"]
        if unknown:
            raise ConfigError(f"--sampler_options: {unknown[0]} is not sent to an --endpoint; leave it out")
        assert options.endpoint is not None
        self._url = options.endpoint
        self.target = target = EndpointTarget(
            options.endpoint,
            options.concurrency,
            streaming=options.streaming,
            sampling={
                WIRE[name][0]: (value, WIRE[name][1])
                for name, value in options.sampling.items()
                if name in WIRE
            },
            encode=Tokenizer(options.model_dir).encode if options.model_dir else None,
        )
        stack.callback(target.close)

    def engine(self) -> dict[str, Any]:
        return {"endpoint": self._url}


def _share_out(options: BenchOptions, requests: list[BenchRequest]) -> list[list[BenchRequest]]:
    """The dataset under the adapters asked for, once for each number of them."""
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


def _load(target: Target, requests: list[BenchRequest], options: BenchOptions) -> list[Record]:
    arrivals = None
    if options.request_rate:
        arrivals = poisson_arrivals(len(requests), options.request_rate, random.Random(options.seed))
    close, advance = _progress(len(requests), options.progress)
    try:
        return asyncio.run(
            run_load(target, requests, concurrency=options.concurrency, arrivals=arrivals, on_done=advance)
        )
    finally:
        close()


def _progress(total: int, wanted: bool) -> tuple[Callable[[], None], Callable[[Record], None]]:
    """How to end the bar, and how to advance it. On a terminal, where tqdm is installed."""
    try:
        tqdm = importlib.import_module("tqdm").tqdm
    except ImportError:
        wanted = False
    if not wanted:
        return (lambda: None), (lambda record: None)
    bar = tqdm(total=total, desc="Requests", dynamic_ncols=True, disable=None)
    return bar.close, lambda record: bar.update()


def _difference(before: AdapterStats | None, after: AdapterStats | None) -> dict[str, int] | None:
    """Counters of the run, and what is in the cache after it."""
    if before is None or after is None:
        return None
    found = {name: getattr(after, name) for name in CACHE_COUNTERS}
    for name in CACHE_COUNTERS:
        if not name.endswith("_adapters"):
            found[name] -= getattr(before, name)
    return found


def _report(
    options: BenchOptions, side: _Side, done: Performance, records: Sequence[Record]
) -> dict[str, Any]:
    rate = done.issue_rate
    return {
        "engine": {
            "model": options.model,
            "model_path": str(options.model_dir) if options.model_dir else None,
            "backend": "pytorch",
            "version": manylora.__version__,
            **side.engine(),
        },
        "machine": {"name": _cpu_name(), **side.device(), "memory": _memory_gib(), "cores": os.cpu_count()},
        "world_info": {
            "tp_size": 1, "pp_size": 1, "ep_size": 1, "world_size": 1, **side.world(),
            "issue_rate": None if rate == float("inf") else rate,
        },
        "request_info": done.request_info(),
        "performance": done.performance(),
        "streaming_metrics": done.streaming_metrics(),
        "decoding_stats": None,
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
