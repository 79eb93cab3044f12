"""manylora triton: launches tritonserver for a model and its adapters, or for a filled model repository."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from manylora.config.foreign import TRITON_COMMAND
from manylora.doors.cli import repo
from manylora.doors.triton.launcher import cli as launcher
from manylora.doors.triton.launcher.new_repository import known_values, write_repository
from manylora.system.command_line import Parser

OWN = "repository"  # in the run directory, removed with it
FILLED = "--model_repo is a repository that is filled already: leave out MODEL, or use --repo to write one"
WRITING = {"repo": "--repo", "lora_root": "--lora-root", "models": "--models", "values": "--set"}


def main(arguments: list[str]) -> int:
    options = argument_parser().parse_args(arguments)
    if options.stop or options.status:
        return launcher.run(options)
    problem = None
    given = [flag for name, flag in WRITING.items() if getattr(options, name)]
    if options.model is None and given:
        problem = f"{given[0]} is for a repository that is written: give MODEL too"
    elif options.model is None and options.model_repo is None:
        problem = "give MODEL, or --model_repo=DIR for a repository that is filled already"
    elif options.model is not None and options.model_repo is not None:
        problem = FILLED
    elif find_spec("httptools") is None:  # needed by the HTTP proxy in front of tritonserver
        problem = "httptools is not installed: pip install 'manylora[server]'"
    if problem is not None:
        print(f"manylora triton: {problem}", file=sys.stderr)
        return 1
    if options.model is None:
        return launcher.run(options)

    def write(run_dir: Path) -> Path:
        folder = options.repo or run_dir / OWN
        write_repository(folder, *repo.plan_of(options))
        return folder

    return launcher.run(options, write)


def argument_parser() -> Parser:
    parser = launcher.argument_parser(
        {**{one: f"use --set {one}=VALUE" for one in known_values()}, **TRITON_COMMAND}
    )
    parser.prog, parser.description = "manylora triton", __doc__
    parser.add_argument("model", nargs="?", metavar="MODEL", help=repo.MODEL)
    parser.add_argument("--repo", type=Path, metavar="DIR", help="write the repository here and keep it")
    repo.add_arguments(parser)
    parser.set_defaults(model_repo=None)
    return parser
