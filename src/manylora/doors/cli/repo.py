"""manylora repo: writes a Triton model repository for a model and its adapters, ready to launch."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from manylora.adapters.catalog.files import find_adapters
from manylora.config.model_folder import local_model
from manylora.doors.triton.launcher.new_repository import write_repository
from manylora.system.command_line import Parser

MODEL = "Hugging Face directory or hub id: org/name[@revision]"
ROOT = (
    "its subfolders are adapters: requests choose one by lora_name, or by lora_task_id where that is a number"
)
SET = "set a template variable in every model that has it; may be repeated"


def main(arguments: list[str]) -> int:
    parser = Parser(prog="manylora repo", description=__doc__)
    parser.add_argument("model", metavar="MODEL", help=MODEL)
    folder = "a new folder, or one that this command wrote before"
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help=folder)
    add_arguments(parser)
    options = parser.parse_args(arguments)
    try:
        models = write_repository(options.output, *plan_of(options))
    except OSError as error:
        print(f"manylora repo: {error.filename or options.output}: {error.strerror}", file=sys.stderr)
        return 1
    print(f"{options.output}: {', '.join(models)}")
    print(f"start it with: manylora triton --model_repo={shlex.quote(str(options.output))}")
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that say how a repository is filled, besides MODEL."""
    add = parser.add_argument
    add("--lora-root", "--lora_root", type=Path, metavar="DIR", help=ROOT)
    add("--models", default="", metavar="A,B,…", help="default: all templates")
    add("--set", dest="values", type=_pair, action="append", default=[], metavar="NAME=VALUE", help=SET)


def plan_of(
    options: argparse.Namespace,
) -> tuple[Path, Path | None, tuple[str, ...], dict[str, str]]:
    """Raises ConfigError. A model given by hub id is downloaded. Says so if there is no adapter yet."""
    root = options.lora_root
    is_adapter = root is not None and (root / "adapter_config.json").is_file()  # refused later
    if root is not None and root.is_dir() and not is_adapter and not find_adapters(root, {}, ()):
        text = f"no adapter is below --lora-root {root} yet: each is a folder with adapter_config.json"
        print(text, file=sys.stderr)
    models = tuple(name.strip() for name in options.models.split(",") if name.strip())
    return local_model(options.model), root, models, dict(options.values)


def _pair(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name.strip(), value
