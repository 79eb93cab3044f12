"""manylora prepare-dataset: writes a dataset of random prompts for `manylora bench`."""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from manylora.config.hub import local_model
from manylora.doors.cli.benchmark.datasets import (
    POPULARITIES,
    Lengths,
    normal_lengths,
    random_requests,
    to_line,
    uniform_lengths,
    write_dataset,
)
from manylora.doors.python.lora import LoRARequest
from manylora.errors import ConfigError
from manylora.generation.tokenizer import Tokenizer
from manylora.system.command_line import Parser


def main(arguments: list[str] | None = None, tokenizer: Path | None = None) -> int:
    """tokenizer: the default of --tokenizer, the model directory given as `manylora bench --model`."""
    options = _parser(tokenizer).parse_args(arguments)
    rng = random.Random(options.random_seed)
    try:
        if options.num_requests < 1:
            raise ValueError(f"--num-requests must be at least 1, got {options.num_requests}")
        requests = random_requests(
            options.num_requests,
            _lengths(options, "input"),
            _lengths(options, "output"),
            vocab_size=Tokenizer(local_model(options.tokenizer)).vocab_size,
            rng=rng,
            adapters=_adapters(options),
            popularity=options.popularity,
        )
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
    """Of prompts or outputs. Raises ValueError."""
    if options.kind == "token-norm-dist":
        return normal_lengths(getattr(options, f"{side}_mean"), getattr(options, f"{side}_stdev"))
    low, high = getattr(options, f"{side}_min"), getattr(options, f"{side}_max")
    if not 1 <= low <= high:
        raise ValueError(f"--{side}-min must be from 1 to --{side}-max ({high}), got {low}")
    return uniform_lengths(low, high)


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
