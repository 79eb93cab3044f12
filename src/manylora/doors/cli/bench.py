"""manylora bench: throughput and latency of a base model with many adapters, in this process.

manylora bench --model M throughput|latency --dataset F [options]
manylora bench --model M prepare-dataset [options]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from manylora.config.engine import SETTINGS
from manylora.config.foreign import BENCH
from manylora.config.hub import local_model
from manylora.config.settings import add_flags
from manylora.doors.cli import prepare_dataset
from manylora.doors.cli.benchmark.report import Record, render
from manylora.doors.cli.benchmark.run import Sample, run_bench
from manylora.doors.python.options import llm_arguments, read_options
from manylora.errors import ConfigError
from manylora.system.command_line import Parser

ENGINE_FLAGS = {row.bench: row for row in SETTINGS if row.bench}
"""The rows of the engine's settings by flag."""


def main(arguments: list[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if "prepare-dataset" in given:
        at = given.index("prepare-dataset")
        options = _common().parse_args(given[:at])
        return prepare_dataset.main(given[at + 1 :], options.model_path or Path(options.model or ""))
    options = _parser().parse_args(given)
    try:
        report, records, samples = _run(options)
    except (ConfigError, ValueError) as error:
        print(f"manylora bench: {error}", file=sys.stderr)
        return 1
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
        _add_engine(command.add_argument_group("engine"))
        add = command.add_argument_group("reports").add_argument
        add("--report_json", type=Path, help="the report")
        add("--output_json", type=Path, help="the answers")
        add("--request_json", type=Path, help="each request's times")
        add("--iteration_log", type=Path, help="write engine statistics every 20 ms as JSON Lines")
    latency.set_defaults(concurrency=1, streaming=True)
    return parser


def _add_engine(group: argparse._ArgumentGroup) -> None:
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


def _run(options: argparse.Namespace) -> tuple[dict[str, Any], list[Record], list[Sample]]:
    """Raises ConfigError, ValueError."""
    if options.dataset is None:
        raise ConfigError("--dataset is missing: manylora prepare-dataset writes one")
    if options.concurrency == 0 or options.concurrency < -1:
        raise ConfigError(f"--concurrency must be -1 or at least 1, got {options.concurrency}")
    named = options.model_path or options.model
    if not named:
        raise ConfigError("--model must name the model's directory")
    model_dir = local_model(named)
    sampling = read_options(options.sampler_options) if options.sampler_options else {}
    if options.beam_width > 1:
        sampling |= {"use_beam_search": True, "n": 1, "best_of": options.beam_width}
    return run_bench(
        options.model or str(model_dir),
        model_dir,
        options.dataset,
        _llm_arguments(options),
        {**sampling, "end_id": options.eos_id},
        num_requests=options.num_requests,
        warmup=options.warmup,
        concurrency=max(0, options.concurrency),
        streaming=options.streaming,
        compare_base=options.compare_base,
        keep_text=options.no_skip_tokenizer_init,
    )


def _llm_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Flags override the file. Prefix reuse is off by default because datasets repeat prompts."""
    found = read_options(options.config) if options.config else {}
    llm_arguments(found)  # raises an error that names a wrong key of the file
    found["kv_cache_config"] = {"enable_block_reuse": False} | (found.get("kv_cache_config") or {})
    for flag, row in ENGINE_FLAGS.items():
        value = getattr(options, flag)
        part, _, field = row.llm.rpartition(".")
        if value is not None:
            (found.setdefault(part, {}) if part else found)[field] = value
    return llm_arguments(found)


def _write(
    options: argparse.Namespace, report: dict[str, Any], records: list[Record], samples: list[Sample]
) -> None:
    """Write the files that were asked for. Raises OSError."""
    files: list[tuple[Path | None, Any]] = [
        (options.report_json, report),
        (options.output_json, [_output(record) for record in records]),
        (options.request_json, [_times(record) for record in records]),
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


def _output(record: Record) -> dict[str, Any]:
    answer = record.answer
    return {
        "task_id": record.request.task_id,
        "output_ids": list(answer.token_ids) if answer else None,
        "output_text": answer.text if answer else None,
        "error": record.error,
    }


def _times(record: Record) -> dict[str, Any]:
    request, answer = record.request, record.answer
    return {
        "task_id": request.task_id,
        "lora_name": request.lora.lora_name if request.lora else None,
        "adapter_tier": answer.adapter_tier if answer else None,
        "num_input_tokens": answer.num_input_tokens if answer else None,
        "num_output_tokens": answer.num_output_tokens if answer else None,
        "start_s": record.started,
        "latency_ms": (record.finished - record.started) * 1e3,
        "ttft_ms": record.ttft_ms,
        "error": record.error,
    }
