"""Runs one benchmark: opens an `LLM`, warms it up, sends the load, and creates the report."""

from __future__ import annotations

import asyncio
import importlib
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manylora.doors.cli.benchmark.datasets import BenchRequest, adapters_of, read_dataset, with_adapters
from manylora.doors.cli.benchmark.report import (
    Answer,
    Record,
    dataset_details,
    issue_rate,
    measure,
    tier_figures,
)
from manylora.stats import EngineStats
from manylora.version import __version__

if TYPE_CHECKING:
    from manylora.doors.python import LLM

PERIOD_S = 0.02
Sample = tuple[float, EngineStats]
"""Seconds of `time.monotonic`, and the engine's statistics at that time."""
COUNTERS = ("host_stores", "host_evictions", "device_loads", "device_evictions")


def run_bench(
    model: str,
    model_dir: Path,
    dataset: Path,
    arguments: dict[str, Any],
    sampling: dict[str, Any],
    num_requests: int = 0,
    warmup: int = 2,
    concurrency: int = 0,
    streaming: bool = False,
    compare_base: bool = False,
    keep_text: bool = False,
) -> tuple[dict[str, Any], list[Record], list[Sample]]:
    """Returns the report, and records and samples of the run with adapters. Raises ConfigError, ValueError.
    arguments: of `LLM`. sampling: fields of SamplingParams. concurrency: 0 is no limit.
    """
    from manylora.doors.python import LLM, LoraConfig

    requests = read_dataset(dataset, num_requests)
    bare = with_adapters(requests, [None] * len(requests))
    has_adapters = bool(adapters_of(requests))
    tokenizer = keep_text or any(request.input_ids is None for request in requests)
    settings = {"skip_tokenizer_init": not tokenizer, **arguments}
    if has_adapters:
        settings.setdefault("lora_config", LoraConfig())  # every module is a target
    with LLM(model_dir, **settings) as llm:

        async def send(request: BenchRequest) -> Answer:
            return await _send(llm, request, streaming, sampling)

        def load(requests: Sequence[BenchRequest]) -> list[Record]:
            if find_spec("tqdm") is None:
                return asyncio.run(run_load(send, requests, concurrency))
            tqdm = importlib.import_module("tqdm").tqdm
            with tqdm(total=len(requests), desc="Requests", dynamic_ncols=True, disable=None) as bar:
                return asyncio.run(run_load(send, requests, concurrency, lambda record: bar.update()))

        asyncio.run(run_load(send, bare[:warmup], concurrency))
        before = llm.stats().adapters
        with _sampled(llm) as samples:
            records = load(requests)
        done = measure(records, streaming=streaming)
        after, ratio = llm.stats().adapters, None
        if compare_base and has_adapters:
            plain = measure(load(bare), streaming=streaming)
            rates = [one["performance"]["system_output_throughput_tok_s"] for one in (done, plain)]
            ratio = rates[0] / rates[1]
        report = _setup(model, model_dir, llm, issue_rate(records))
    cache = {name: getattr(after, name) - getattr(before, name) for name in COUNTERS}
    adapters = {
        "num_distinct": len(adapters_of(requests)),
        "num_requests": sum(request.lora is not None for request in requests),
        "tiers": tier_figures(records),
        "cache": cache | {name: getattr(after, name) for name in ("host_adapters", "device_adapters")},
        "ratio": ratio,
    }
    details = {"path": str(dataset), **dataset_details(records)}
    decoding, stats = None, samples[-1][1]
    if stats.draft_tokens:
        decoding = {  # since the engine's start
            "num_draft_tokens": stats.draft_tokens,
            "num_accepted_draft_tokens": stats.accepted_draft_tokens,
            "draft_acceptance_rate": stats.accepted_draft_tokens / stats.draft_tokens,
            "acceptance_length": 1 + stats.accepted_draft_tokens / stats.drafts,  # per step with a draft
        }
    report |= {**done, "dataset": details, "adapters": adapters, "decoding_stats": decoding}
    return report, records, samples


async def run_load(
    send: Callable[[BenchRequest], Awaitable[Answer]],
    requests: Sequence[BenchRequest],
    concurrency: int = 0,
    on_done: Callable[[Record], None] = lambda record: None,
) -> list[Record]:
    """Send all requests. Returns records in their order. concurrency: requests at one time; 0: no limit."""
    gate = asyncio.Semaphore(concurrency or max(1, len(requests)))

    async def one(request: BenchRequest) -> Record:
        async with gate:
            started = time.monotonic()
            try:
                answer = await send(request)
            except Exception as error:
                text = str(error) or type(error).__name__
                record = Record(request, started, time.monotonic(), None, text)
            else:
                record = Record(request, started, time.monotonic(), answer)
        on_done(record)
        return record

    return list(await asyncio.gather(*map(one, requests)))


async def _send(llm: LLM, request: BenchRequest, streaming: bool, sampling: dict[str, Any]) -> Answer:
    from manylora.doors.python import SamplingParams

    params = SamplingParams(**{**sampling, "max_tokens": request.output_tokens})
    prompt = request.prompt if request.input_ids is None else request.input_ids
    assert prompt is not None
    result = llm.generate_async(prompt, params, request.lora, streaming)
    first: float | None = None
    if streaming:
        async for piece in result:
            if first is None and piece.outputs[0].token_ids:
                first = time.monotonic()
    output = await result
    if first is None and output.metrics is not None and output.metrics.first_token_ns:
        first = output.metrics.first_token_ns * 1e-9
    ids = tuple(output.outputs[0].token_ids)
    text = output.outputs[0].text or None
    return Answer(first, len(output.prompt_token_ids), len(ids), ids, text, output.adapter_tier)


@contextmanager
def _sampled(llm: LLM) -> Iterator[list[Sample]]:
    """Yields a list to which the engine's statistics are added every PERIOD_S seconds, and at the end."""
    samples: list[Sample] = []
    stop = threading.Event()

    def run() -> None:
        going = True
        while going:
            going = not stop.wait(PERIOD_S)
            samples.append((time.monotonic(), llm.stats()))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        stop.set()
        thread.join()


def _setup(model: str, model_dir: Path, llm: LLM, issue_rate: float | None) -> dict[str, Any]:
    """The report's sections about model, machine and settings."""
    from manylora.config.resolve import weights_algo
    from manylora.kernels.device import open_device
    from manylora.model.checkpoint import read_model_config
    from manylora.model.weights import compute_dtype

    config, device = llm.config, open_device(llm.config.device)
    dtype = compute_dtype(config.dtype, read_model_config(model_dir), device)
    name = str(dtype).removeprefix("torch.")
    fp8_kv = config.quant is not None and config.quant.fp8_kv_cache
    cpu = "unknown"
    if Path("/proc/cpuinfo").is_file():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    return {
        "engine": {
            "model": model,
            "model_path": str(model_dir),
            "backend": "pytorch",
            "version": __version__,
            "dtype": name,
            "kv_cache_dtype": "fp8" if fp8_kv else name,
            "quantization": weights_algo(config.model_dir, config.quant),
        },
        "machine": {
            "name": cpu,
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
            "issue_rate": issue_rate,
        },
    }
