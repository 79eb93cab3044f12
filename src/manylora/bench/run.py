"""Runs one benchmark: opens an `LLM`, warms it up, sends the load, and creates the report."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manylora.bench.datasets import BenchRequest, adapters_of, read_dataset, with_adapters
from manylora.bench.load import LocalTarget, Record, Sample, Sampler, progress, run_load
from manylora.bench.report import dataset_details, issue_rate, measure, tier_figures
from manylora.stats import AdapterStats, EngineStats
from manylora.version import __version__

if TYPE_CHECKING:
    from manylora.llmapi import LLM

CACHE_COUNTERS = (
    "host_stores", "host_evictions", "device_loads", "device_evictions", "host_adapters", "device_adapters",
)  # fmt: skip


@dataclass(frozen=True)
class BenchOptions:
    """model_dir: a Hugging Face directory. llm: arguments of `LLM`. sampling: fields of SamplingParams for
    every request. concurrency: 0 is no limit. compare_base: also run without adapters.
    """

    model: str
    model_dir: Path
    dataset: Path
    llm: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    num_requests: int = 0
    warmup: int = 2
    concurrency: int = 0
    streaming: bool = False
    compare_base: bool = False
    keep_text: bool = False


@dataclass(frozen=True)
class BenchResult:
    """records, samples: of the run with adapters."""

    report: dict[str, Any]
    records: list[Record]
    samples: list[Sample]


def run_bench(options: BenchOptions) -> BenchResult:
    """Raises ConfigError for options that cannot be used, ValueError if no request was answered."""
    requests = read_dataset(options.dataset, options.num_requests)
    bare = with_adapters(requests, [None] * len(requests))
    with _open_llm(options, requests) as llm:
        target = LocalTarget(llm, options.streaming, options.sampling)
        asyncio.run(run_load(target, bare[: options.warmup], concurrency=options.concurrency))
        before = llm.stats().adapters
        with Sampler(llm) as sampler:
            records = _load(target, requests, options)
        done = measure(records, streaming=options.streaming)
        adapters = {
            "num_distinct": len(adapters_of(requests)),
            "num_requests": sum(request.lora is not None for request in requests),
            "tiers": tier_figures(records),
            "cache": _difference(before, llm.stats().adapters),
            "ratio": None,
        }
        if options.compare_base and adapters["num_distinct"]:
            plain = measure(_load(target, bare, options), streaming=options.streaming)
            rates = [one["performance"]["system_output_throughput_tok_s"] for one in (done, plain)]
            adapters["ratio"] = rates[0] / rates[1]
        decoding = _decoding(sampler.samples[-1][1])
        report = _report(options, llm, done, records) | {"adapters": adapters, "decoding_stats": decoding}
    return BenchResult(report, records, sampler.samples)


def _open_llm(options: BenchOptions, requests: Sequence[BenchRequest]) -> LLM:
    """With adapters but no lora_config, every module is a target. Raises ConfigError."""
    from manylora.llmapi import LLM, LoraConfig

    tokenizer = options.keep_text or any(request.input_ids is None for request in requests)
    settings = {"skip_tokenizer_init": not tokenizer, **options.llm}
    if adapters_of(requests):
        settings.setdefault("lora_config", LoraConfig())
    return LLM(options.model_dir, **settings)


def _load(target: LocalTarget, requests: Sequence[BenchRequest], options: BenchOptions) -> list[Record]:
    with progress(len(requests)) as advance:
        return asyncio.run(run_load(target, requests, concurrency=options.concurrency, on_done=advance))


def _difference(before: AdapterStats, after: AdapterStats) -> dict[str, int]:
    """Counters of the run, and the number of adapters in the cache afterwards."""
    found = {name: getattr(after, name) for name in CACHE_COUNTERS}
    for name in CACHE_COUNTERS:
        if not name.endswith("_adapters"):
            found[name] -= getattr(before, name)
    return found


def _decoding(stats: EngineStats) -> dict[str, Any] | None:
    """Draft statistics since the engine's start. None: no drafts."""
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
    options: BenchOptions, llm: LLM, done: dict[str, Any], records: Sequence[Record]
) -> dict[str, Any]:
    from manylora.config.build_record import weights_algo
    from manylora.kernels.device import open_device
    from manylora.model.checkpoint import read_model_config
    from manylora.model.weights import compute_dtype

    config, device = llm.config, open_device(llm.config.device)
    dtype = compute_dtype(config.dtype, read_model_config(options.model_dir), device)
    name = str(dtype).removeprefix("torch.")
    fp8_kv = config.quant is not None and config.quant.fp8_kv_cache
    return {
        "engine": {
            "model": options.model,
            "model_path": str(options.model_dir),
            "backend": "pytorch",
            "version": __version__,
            "dtype": name,
            "kv_cache_dtype": "fp8" if fp8_kv else name,
            "quantization": weights_algo(config.model_dir, config.quant),
        },
        "machine": {
            "name": _cpu_name(),
            "device": device.name,
            "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
            "cores": os.cpu_count(),
        },
        "world_info": {
            "tp_size": config.tensor_parallel_size,
            "pp_size": config.pipeline_parallel_size,
            "ep_size": config.moe_expert_parallel_size,
            "world_size": config.world_size,
            "max_batch_size": config.max_batch_size,
            "max_num_tokens": config.max_num_tokens,
            "scheduling_policy": config.batch_scheduler_policy,
            "kv_cache_percentage": 100 * config.kv_cache_free_gpu_mem_fraction,
            "issue_rate": issue_rate(records),
        },
        **done,
        "dataset": {"path": str(options.dataset), **dataset_details(records)},
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
