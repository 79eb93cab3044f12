"""manylora bench: throughput and latency of a base model with many adapters, in this process.

manylora bench --model M throughput|latency --dataset F [options]
manylora bench --model M prepare-dataset [options]
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manylora.config.engine import SETTINGS
from manylora.config.foreign import BENCH
from manylora.config.model_folder import local_model
from manylora.config.settings import add_flags
from manylora.doors.cli import prepare_dataset
from manylora.doors.cli.bench_report import (
    Answer,
    Record,
    dataset_details,
    issue_rate,
    measure,
    render,
    tier_figures,
)
from manylora.doors.cli.prepare_dataset import BenchRequest, adapters_of, read_dataset, with_adapters
from manylora.doors.python.options import llm_arguments, read_options
from manylora.errors import ConfigError
from manylora.stats import EngineStats
from manylora.system.command_line import Parser
from manylora.version import __version__

if TYPE_CHECKING:
    from manylora.doors.python import LLM

PERIOD_S = 0.02
Sample = tuple[float, EngineStats]
"""Seconds of `time.monotonic`, and the engine's statistics at that time."""
COUNTERS = ("host_stores", "host_evictions", "device_loads", "device_evictions")
ENGINE_FLAGS = {row.bench: row for row in SETTINGS if row.bench}
"""The rows of the engine's settings by flag."""


def main(arguments: list[str]) -> int:
    if "prepare-dataset" in arguments:
        at = arguments.index("prepare-dataset")
        options = _common().parse_args(arguments[:at])
        return prepare_dataset.main(arguments[at + 1 :], options.model_path or Path(options.model or ""))
    options = _parser().parse_args(arguments)
    report, records, samples = _run(options)
    print(render(report))
    try:
        _write(options, report, records, samples)
    except OSError as error:
        print(f"manylora bench: {error.filename} cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    errors = [record for record in records if record.error is not None]
    for record in errors[:5]:
        print(f"manylora bench: request {record.request.task_id}: {record.error}", file=sys.stderr)
    return 1 if errors else 0


def _common(**settings: Any) -> Parser:
    parser = Parser(prog="manylora bench", instead=BENCH, **settings)
    _add_model(parser)
    return parser


def _add_model(parser: argparse.ArgumentParser, **settings: Any) -> None:
    named = "Hugging Face directory or hub id; with --model_path only a name for the report"
    parser.add_argument("--model", help=named, **settings)
    path = "the model directory, if --model is only a name"
    parser.add_argument("--model_path", type=Path, help=path, **settings)


def _parser() -> Parser:
    parser = _common(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    throughput = commands.add_parser("throughput", help="many concurrent requests")
    latency = commands.add_parser("latency", help="one request at a time, streaming")
    commands.add_parser("prepare-dataset", help="see manylora prepare-dataset --help")
    for command in (throughput, latency):
        _add_model(command, default=argparse.SUPPRESS)  # here too, as in vllm bench
        add: Callable[..., Any] = command.add_argument_group("load").add_argument
        add("--dataset", type=Path, help="JSON Lines file, one request per line")
        add("--num_requests", type=int, default=0, help="use only the first N requests; 0: all")
        add("--warmup", type=int, default=2, help="warm-up requests to the base model; default 2")
        add("--concurrency", type=int, default=-1, help="maximum number of concurrent requests; -1: no limit")
        add("--streaming", action="store_true", help="stream tokens; measures TTFT and TPOT")
        add("--eos_id", type=int, default=-1, help="id of the end token; -1: generate all output_tokens")
        add("--beam_width", type=int, default=1)
        add("--sampler_options", type=Path, help="YAML or JSON file with fields of SamplingParams")
        add("--compare_base", action="store_true", help="also run without adapters and report the ratio")
        group = command.add_argument_group("engine")
        group.add_argument("--backend", choices=("pytorch",), default="pytorch")
        file = "YAML or JSON file with arguments of LLM; flags override it"
        group.add_argument("--config", "--extra_llm_api_options", type=Path, help=file)
        for flag, row in ENGINE_FLAGS.items():
            if row.kind != "bool":
                add_flags(group, row, flag)
        chunks = group.add_mutually_exclusive_group()
        for word, action in (("enable", "store_true"), ("disable", "store_false")):
            flag = f"--{word}_chunked_context"
            chunks.add_argument(flag, dest="enable_chunked_context", action=action, default=None)
        group.add_argument("--no_skip_tokenizer_init", action="store_true", help="detokenise the outputs")
        add = command.add_argument_group("reports").add_argument
        add("--report_json", type=Path, help="the report")
        add("--output_json", type=Path, help="the answers")
        add("--request_json", type=Path, help="each request's times")
        add("--iteration_log", type=Path, help="write engine statistics every 20 ms as JSON Lines")
    latency.set_defaults(concurrency=1, streaming=True)
    return parser


def _run(options: argparse.Namespace) -> tuple[dict[str, Any], list[Record], list[Sample]]:
    """The report, and records and samples of the run with adapters. Raises ConfigError, ValueError."""
    if options.dataset is None:
        raise ConfigError("--dataset is missing: manylora prepare-dataset writes one")
    if options.concurrency == 0 or options.concurrency < -1:
        raise ConfigError(f"--concurrency must be -1 or at least 1, got {options.concurrency}")
    named = options.model_path or options.model
    streaming, concurrency = options.streaming, options.concurrency
    if not named:
        raise ConfigError("--model must name the model's directory")
    model_dir = local_model(named)
    sampling = read_options(options.sampler_options) if options.sampler_options else {}
    if options.beam_width > 1:
        sampling |= {"use_beam_search": True, "n": 1, "best_of": options.beam_width}
    sampling["end_id"] = options.eos_id
    # Flags override the file. Prefix reuse is off by default because datasets repeat prompts.
    arguments = read_options(options.config) if options.config else {}
    llm_arguments(arguments)  # raises an error that names a wrong key of the file
    arguments["kv_cache_config"] = {"enable_block_reuse": False} | (arguments.get("kv_cache_config") or {})
    for flag, row in ENGINE_FLAGS.items():
        value = getattr(options, flag)
        part, _, field = row.llm.rpartition(".")
        if value is not None:
            (arguments.setdefault(part, {}) if part else arguments)[field] = value
    from manylora.doors.python import LLM, LoraConfig

    arguments = llm_arguments(arguments)
    requests = read_dataset(options.dataset, options.num_requests)
    bare = with_adapters(requests, [None] * len(requests))
    has_adapters = bool(adapters_of(requests))
    tokenizer = options.no_skip_tokenizer_init or any(request.input_ids is None for request in requests)
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

        asyncio.run(run_load(send, bare[: options.warmup], concurrency))
        before = llm.stats().adapters
        with _sampled(llm) as samples:
            records = load(requests)
        done = measure(records, streaming=streaming)
        after, ratio = llm.stats().adapters, None
        if options.compare_base and has_adapters:
            plain = measure(load(bare), streaming=streaming)
            rates = [one["performance"]["system_output_throughput_tok_s"] for one in (done, plain)]
            ratio = rates[0] / rates[1]
        report = _setup(options.model or str(model_dir), model_dir, llm, issue_rate(records))
    cache = {name: getattr(after, name) - getattr(before, name) for name in COUNTERS}
    adapters = {
        "num_distinct": len(adapters_of(requests)),
        "num_requests": sum(request.lora is not None for request in requests),
        "tiers": tier_figures(records),
        "cache": cache | {name: getattr(after, name) for name in ("host_adapters", "device_adapters")},
        "ratio": ratio,
    }
    details = {"path": str(options.dataset), **dataset_details(records)}
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


def _write(
    options: argparse.Namespace, report: dict[str, Any], records: list[Record], samples: list[Sample]
) -> None:
    outputs, times = [], []
    for record in records:
        request, known = record.request, vars(record.answer) if record.answer else {}
        task, error = {"task_id": request.task_id}, {"error": record.error}
        told = {"output_ids": known.get("token_ids"), "output_text": known.get("text")}
        outputs.append({**task, **told, **error})
        names = ("adapter_tier", "num_input_tokens", "num_output_tokens")
        when = {
            "lora_name": request.lora.lora_name if request.lora else None,
            **{name: known.get(name) for name in names},
            "start_s": record.started,
            "latency_ms": (record.finished - record.started) * 1e3,
            "ttft_ms": record.ttft_ms,
        }
        times.append({**task, **when, **error})
    files: list[tuple[Path | None, Any]] = [
        (options.report_json, report),
        (options.output_json, outputs),
        (options.request_json, times),
    ]
    for path, value in files:
        if path:
            path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    if options.iteration_log:
        with options.iteration_log.open("w", encoding="utf-8") as log:
            for at, stats in samples:
                figures = asdict(stats)
                del figures["adapters"]["residents"]
                log.write(json.dumps({"time_s": at, **figures}) + "\n")


async def run_load(
    send: Callable[[BenchRequest], Awaitable[Answer]],
    requests: Sequence[BenchRequest],
    concurrency: int = -1,
    on_done: Callable[[Record], None] = lambda record: None,
) -> list[Record]:
    """Send all requests. Returns records in their order. concurrency: requests at one time; -1: no limit."""
    gate = asyncio.Semaphore(max(1, len(requests)) if concurrency == -1 else concurrency)

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
    from manylora.config.engine import weights_algo
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
