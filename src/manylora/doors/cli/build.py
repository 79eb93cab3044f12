"""manylora build: writes a model directory, optionally quantised, with the limits it is served with."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from manylora.checkpoints.quant.config import QuantConfig
from manylora.config.engine import LIMITS, SETTINGS
from manylora.config.foreign import TRTLLM_BUILD
from manylora.config.model_folder import local_model
from manylora.config.settings import add_flags
from manylora.errors import ConfigError
from manylora.system.command_line import Parser

LORA = ("lora_dir", "lora_target_modules", "lora_ckpt_source", "max_lora_rank")
WITH_MEANING = ("lora_plugin", "max_input_len")


def main(arguments: list[str]) -> int:
    trtllm = argparse.ArgumentParser(add_help=False, allow_abbrev=False)  # for its flags that are not ours
    for name in (*TRTLLM_BUILD, *WITH_MEANING):
        trtllm.add_argument(f"--{name}", nargs="?", const="", default=argparse.SUPPRESS)
    theirs, ours = trtllm.parse_known_args(arguments)
    options = _parser().parse_args(ours)
    try:
        _take_trtllm_flags(vars(theirs), options)
        options.model_dir = local_model(options.model_dir)
        _check_ranks(options)
        print(_build(options))
        if ignored := [f"--{name}" for name in vars(theirs) if name != "lora_plugin"]:
            print(f"without effect here: {', '.join(ignored)}")
    except (ConfigError, ValueError) as error:
        # The user knows settings by the flags.
        text = re.sub(rf"(?<![\w/-])({'|'.join(vars(options))})\b(?![/.])", r"--\1", str(error))
        print(f"manylora build: {text}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    listed = {
        "taken": WITH_MEANING,
        "refused unless they change nothing": TRTLLM_BUILD.refused,
        "without effect": TRTLLM_BUILD.ignored,
    }
    theirs = (f"{what}: {' '.join(f'--{name}' for name in names)}" for what, names in listed.items())
    parser = Parser(
        prog="manylora build", description=__doc__, epilog="With --trtllm-flags: " + ". ".join(theirs)
    )
    add = parser.add_argument
    model = "Hugging Face directory or hub id: org/name[@revision]"
    add("--model_dir", "--checkpoint_dir", required=True, help=model)
    add("--output_dir", type=Path, required=True, help="empty directory, or an earlier build")
    for row in SETTINGS:
        if row.build:
            add_flags(parser, row, row.build, None if row.name in LIMITS else row.default)
    add("--lora_dir", nargs="+", default=[], help="adapters to infer the target modules from")
    add("--lora_ckpt_source", choices=("hf", "nemo"), default="hf")
    meant = "also accept the other flags of trtllm-build that apply here"
    add("--trtllm-flags", action="store_true", help=meant)
    return parser


def _take_trtllm_flags(given: dict[str, str], options: argparse.Namespace) -> None:
    """Set lora_plugin and max_input_len. None: not given. Raises ConfigError for what cannot be taken."""
    if given and not options.trtllm_flags:
        names = ", ".join(f"--{name}" for name in given)
        raise ConfigError(
            f"leave out {names}, which trtllm-build takes for its engines, or add --trtllm-flags to take "
            "what has a meaning here"
        )
    for name, value in given.items():
        reason = TRTLLM_BUILD.refused.get(name)
        if reason is not None and not TRTLLM_BUILD.allows(name, value):
            raise ConfigError(f"{f'--{name} {value}'.strip()} cannot be had: {reason}; leave it out")
    plugin, length = given.get("lora_plugin"), given.get("max_input_len")
    options.lora_plugin = None if plugin is None else plugin not in ("disable", "None")
    if length is not None and not length.isdecimal():
        raise ConfigError(f"--max_input_len must be a whole number, got {length or 'none'}")
    options.max_input_len = None if length is None else int(length)


def _check_ranks(options: argparse.Namespace) -> None:
    for name in ("tp_size", "pp_size"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name} must be at least 1, got {getattr(options, name)}")
    if options.tp_size == options.pp_size == 1:
        return
    from manylora.model.checkpoint import read_model_config
    from manylora.ranks.mapping import Mapping, check_mapping

    mapping = Mapping(options.tp_size * options.pp_size, 0, options.tp_size, options.pp_size)
    check_mapping(read_model_config(options.model_dir), mapping)


def _build(options: argparse.Namespace) -> str:
    from manylora.model.builder import BuildPlan, build

    quant = QuantConfig(
        quant_algo=options.quant_algo,
        kv_cache_quant_algo=options.kv_cache_quant_algo,
        group_size=options.group_size,
        exclude_modules=options.exclude_modules,
    )
    limits = {name: getattr(options, name) for name in LIMITS}
    if options.max_input_len is not None:
        limits["max_input_len"] = options.max_input_len
    return build(
        BuildPlan(
            options.model_dir,
            options.output_dir,
            dtype=options.dtype,
            quant=quant,
            limits=limits,
            lora=_lora(options),
            tp_size=options.tp_size,
            pp_size=options.pp_size,
        )
    )


def _lora(options: argparse.Namespace) -> dict[str, Any] | None:
    """Fields of LoraConfig, with target modules resolved. None if no flag mentions adapters."""
    from manylora.adapters.formats.base_weights import BaseWeights
    from manylora.adapters.modules import MODULE_NAMES
    from manylora.config.engine import with_whole_qkv
    from manylora.doors.python.llm_args import LoraConfig
    from manylora.doors.python.options import inferred_targets
    from manylora.model.checkpoint import read_model_config

    given = [name for name in LORA if getattr(options, name) not in ([], (), None, "hf")]
    if options.lora_plugin is False and given:
        raise ConfigError(f"--lora_plugin disable and --{given[0]} contradict each other: leave one out")
    if not (given or options.lora_plugin):
        return None
    for name in options.lora_target_modules:
        if name not in MODULE_NAMES:
            names = ", ".join(MODULE_NAMES)
            raise ConfigError(f"--lora_target_modules: Invalid LoRA module {name}; modules are {names}")
    rank = LoraConfig.max_lora_rank if options.max_lora_rank is None else options.max_lora_rank
    config = LoraConfig(
        options.lora_dir, options.lora_ckpt_source, rank, lora_target_modules=options.lora_target_modules
    )
    targets = tuple(config.lora_target_modules)
    if not targets:
        model = read_model_config(options.model_dir)
        targets = inferred_targets(config, model, BaseWeights(options.model_dir))
    fields = {name: getattr(config, name) for name in LORA}
    return fields | {"lora_target_modules": list(with_whole_qkv(targets))}
