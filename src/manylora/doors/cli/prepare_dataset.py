"""manylora prepare-dataset: writes a dataset of random prompts for `manylora bench`."""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from manylora.config.model_folder import local_model
from manylora.doors.python.llm_args import LoRARequest
from manylora.errors import ConfigError
from manylora.generation.tokenizer import Tokenizer
from manylora.system.command_line import Parser

# A dataset is JSON Lines with trtllm-bench's fields, one request per line.

T = TypeVar("T")
Lengths = Callable[[random.Random], int]
"""Draws a number of tokens."""

UNSUPPORTED = ("turns", "media_paths")
POPULARITIES = ("distinct", "uniform", "zipf", "identical")


@dataclass(frozen=True)
class BenchRequest:
    """task_id: the request's number, not the adapter's. prompt: unused if input_ids are given."""

    task_id: int
    prompt: str | None
    input_ids: tuple[int, ...] | None
    output_tokens: int
    lora: LoRARequest | None = None


def read_dataset(path: Path, num_requests: int = 0) -> list[BenchRequest]:
    """The first num_requests lines; 0: all. Raises ConfigError, also for a lora_path that does not exist."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"--dataset {path} cannot be read: {error.strerror}") from error
    found: list[BenchRequest] = []
    for number, line in enumerate(lines, 1):
        if num_requests and len(found) == num_requests:
            break
        if line.strip():
            try:
                found.append(_request(json.loads(line)))
            except json.JSONDecodeError as error:
                text = f"--dataset {path}, line {number} is not JSON ({error.msg}): each line is one request"
                raise ConfigError(text) from error
            except (ValueError, TypeError) as error:
                raise ConfigError(f"--dataset {path}, line {number}: {error}") from error
    if not found:
        raise ConfigError(f"--dataset {path} holds no request")
    if len(found) < num_requests:
        raise ConfigError(f"--dataset {path} holds {len(found)} requests, fewer than --num_requests")
    return found


def write_dataset(path: Path, requests: Iterable[BenchRequest]) -> None:
    path.write_text("".join(f"{to_line(request)}\n" for request in requests), encoding="utf-8")


def to_line(request: BenchRequest) -> str:
    ids, prompt = request.input_ids, {"prompt": request.prompt}
    given: dict[str, Any] = prompt if ids is None else {"input_ids": list(ids)}
    entry = {"task_id": request.task_id, **given, "output_tokens": request.output_tokens}
    if (lora := request.lora) is not None:
        names = ("lora_name", "lora_int_id", "lora_path")
        entry["lora_request"] = {name: getattr(lora, name) for name in names}
    return json.dumps(entry, ensure_ascii=False, separators=(",", ":"))


def adapters_of(requests: Iterable[BenchRequest]) -> list[LoRARequest]:
    """The distinct adapters, in order of first use."""
    return list({r.lora.lora_int_id: r.lora for r in requests if r.lora is not None}.values())


def with_adapters(
    requests: Iterable[BenchRequest], adapters: Iterable[LoRARequest | None]
) -> list[BenchRequest]:
    """The same requests with other adapters, one per request."""
    return [replace(r, lora=lora) for r, lora in zip(requests, adapters, strict=True)]


def spread(popularity: str, adapters: Sequence[T], count: int, rng: random.Random) -> list[T]:
    """An adapter for each of `count` requests. distinct: round robin. zipf: the k-th weighs k ** -1.5."""
    if popularity not in POPULARITIES:
        raise ValueError(f"popularity must be one of {', '.join(POPULARITIES)}, got {popularity!r}")
    if popularity in ("distinct", "identical"):
        return [adapters[i % len(adapters) if popularity == "distinct" else 0] for i in range(count)]
    weights = [(k + 1) ** -1.5 for k in range(len(adapters))] if popularity == "zipf" else None
    return rng.choices(adapters, weights, k=count)


def _request(entry: Any) -> BenchRequest:
    if not isinstance(entry, dict):
        raise ValueError("a line must be a JSON object")
    task_id = entry.get("task_id", -1)
    for name in UNSUPPORTED:
        if entry.get(name):
            raise ValueError(f"{name} is not supported")
    prompt, ids = entry.get("prompt"), entry.get("input_ids", entry.get("logits"))
    if prompt is None and ids is None:
        raise ValueError(f"prompt, input_ids, and turns for task {task_id} are all None.")
    output_tokens = entry.get("output_tokens")
    if not isinstance(output_tokens, int) or output_tokens < 1:
        raise ValueError(f"output_tokens must be a number of tokens, at least 1, got {output_tokens!r}")
    if ids is not None and not (ids and all(isinstance(token, int) for token in ids)):
        raise ValueError("input_ids must be a list of token ids")
    lora = entry.get("lora_request")
    return BenchRequest(
        task_id=int(task_id),
        prompt=prompt,
        input_ids=None if ids is None else tuple(ids),
        output_tokens=output_tokens,
        lora=LoRARequest(**{"lora_path": "", **lora}) if lora else None,
    )


def main(arguments: list[str], tokenizer: Path | None = None) -> int:
    """tokenizer: the default of --tokenizer, the model directory given as `manylora bench --model`."""
    options = _parser(tokenizer).parse_args(arguments)
    rng = random.Random(options.random_seed)
    try:
        if options.num_requests < 1:
            raise ValueError(f"--num-requests must be at least 1, got {options.num_requests}")
        lengths = _lengths(options, "input"), _lengths(options, "output")
        vocab_size = Tokenizer(local_model(options.tokenizer)).vocab_size
        chosen = spread(options.popularity, _adapters(options), options.num_requests, rng)
        requests = []
        for number, lora in enumerate(chosen):
            ids = tuple(rng.randrange(vocab_size) for _ in range(lengths[0](rng)))
            requests.append(BenchRequest(number, None, ids, lengths[1](rng), lora))
        if options.stdout:
            print("\n".join(map(to_line, requests)))
        else:
            write_dataset(options.output, requests)
    except OSError as error:
        print(f"{options.output} cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    except (ConfigError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _parser(tokenizer: Path | None) -> argparse.ArgumentParser:
    parser = Parser(prog="manylora prepare-dataset", description=__doc__)
    add = parser.add_argument
    required = tokenizer is None
    add("--tokenizer", type=Path, default=tokenizer, required=required, help="a model's directory")
    add("--output", type=Path, default=Path("preprocessed_dataset.json"), help="JSON Lines")
    add("--stdout", action="store_true", help="print it instead")
    add("--random-seed", type=int, default=420)
    add("--task-id", type=int, default=-1, help="adapter id of every request; -1: no adapter")
    ids = "random adapter ids from LO to HI; -1: the base model"
    add("--rand-task-id", type=int, nargs=2, metavar=("LO", "HI"), help=ids)
    add("--lora-dir", type=Path, help="adapters are <lora-dir>/<id>")
    shape = "popularity of the adapters; default: uniform"
    add("--popularity", choices=POPULARITIES, default="uniform", help=shape)
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    normal = kinds.add_parser("token-norm-dist", help="lengths from a normal distribution")
    uniform = kinds.add_parser("token-unif-dist", help="lengths from a uniform distribution")
    for kind in (normal, uniform):
        kind.add_argument("--num-requests", type=int, required=True)
    for side in ("input", "output"):
        normal.add_argument(f"--{side}-mean", type=float, required=True, help="tokens")
        normal.add_argument(f"--{side}-stdev", type=float, required=True, help="tokens")
        uniform.add_argument(f"--{side}-min", type=int, required=True, help="tokens")
        uniform.add_argument(f"--{side}-max", type=int, required=True, help="tokens")
    return parser


def _lengths(options: argparse.Namespace, side: str) -> Lengths:
    if options.kind == "token-norm-dist":
        mean, stdev = getattr(options, f"{side}_mean"), getattr(options, f"{side}_stdev")
        return lambda rng: max(1, round(rng.gauss(mean, stdev)))
    low, high = getattr(options, f"{side}_min"), getattr(options, f"{side}_max")
    if not 1 <= low <= high:
        raise ValueError(f"--{side}-min must be from 1 to --{side}-max ({high}), got {low}")
    return lambda rng: rng.randint(low, high)


def _adapters(options: argparse.Namespace) -> list[LoRARequest | None]:
    low, high = options.rand_task_id or (options.task_id, options.task_id)
    if not -1 <= low <= high:
        raise ValueError(f"adapter ids must be -1 or more, the lower one first, got {low} and {high}")
    if high >= 0 and options.lora_dir is None:
        raise ValueError("--task-id and --rand-task-id need --lora-dir")
    return [
        LoRARequest(f"lora_{number}", number, str(options.lora_dir / str(number))) if number >= 0 else None
        for number in range(low, high + 1)
    ]
