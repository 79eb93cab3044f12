"""manylora build: writes a model directory, optionally quantised, with the limits it is served with."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from manylora.commands.trtllm_flags import (
    check_flags,
    enables_lora,
    help_text,
    max_input_len,
    take_flags,
    without_effect,
)
from manylora.config.build_record import LIMITS
from manylora.config.hub import local_model
from manylora.errors import ConfigError
from manylora.quant.config import INTEGER, SERVED, QuantConfig
from manylora.system.command_line import Parser

LORA = ("lora_dir", "lora_target_modules", "lora_ckpt_source", "max_lora_rank")


def main(arguments: list[str] | None = None) -> int:
    theirs, ours = take_flags(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(ours)
    try:
        check_flags(theirs, options.trtllm_flags)
        options.lora_plugin, options.max_input_len = enables_lora(theirs), max_input_len(theirs)
        options.model_dir = local_model(options.model_dir)
        _check_ranks(options)
        quant = QuantConfig(
            quant_algo=options.quant_algo,
            kv_cache_quant_algo=options.kv_cache_quant_algo,
            group_size=options.group_size,
            exclude_modules=options.exclude_modules,
        )
        print(_build(options, quant))
        if line := without_effect(theirs):
            print(line)
    except (ConfigError, ValueError) as error:
        print(f"manylora build: {_with_flags(str(error), vars(options))}", file=sys.stderr)
        return 1
    return 0


def _with_flags(text: str, names: Iterable[str]) -> str:
    """The text with setting names replaced by the flags that the user typed."""
    return re.sub(rf"(?<![\w/-])({'|'.join(names)})\b(?![/.])", r"--\1", text)


def _build(options: argparse.Namespace, quant: QuantConfig) -> str:
    from manylora.model.builder import BuildPlan, build

    limits = {name: getattr(options, name) for name in LIMITS}
    if options.max_input_len is not None:
        limits["max_input_len"] = options.max_input_len
    built = build(
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
    megabytes = f"{built.bytes_before / 1e6:.1f} -> {built.bytes_after / 1e6:.1f} MB"
    summary = f"{options.output_dir}: weights {megabytes}"
    if built.num_quantised:
        summary += f", {built.num_quantised} of {built.num_linears} linear layers in {built.quant_algo}"
    return summary


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="manylora build", description=__doc__, epilog=help_text())
    add = parser.add_argument
    add(
        "--model_dir", "--checkpoint_dir", required=True,
        help="Hugging Face directory or hub id: org/name[@revision]",
    )  # fmt: skip
    add("--output_dir", type=Path, required=True, help="empty directory, or an earlier build")
    add("--dtype", choices=("auto", "float32", "float16", "bfloat16"), default="auto")
    add("--max_batch_size", type=int, help="maximum number of sequences in one step")
    add(
        "--max_seq_len",
        "--max_decoder_seq_len",
        type=int,
        help="maximum tokens of prompt and output together",
    )
    add("--max_beam_width", type=int, help="maximum number of beams of one request")
    add("--max_num_tokens", type=int, help="maximum number of tokens in one step")
    add(
        "--lora_target_modules",
        nargs="+",
        default=[],
        metavar="MODULE",
        help="for example attn_q attn_k attn_v",
    )
    add("--max_lora_rank", type=int, help="default: 64 when adapters are served")
    add("--lora_dir", nargs="+", default=[], help="adapters to infer the target modules from")
    add("--lora_ckpt_source", choices=("hf", "nemo"), default="hf")
    add("--quant_algo", help=f"{', '.join((*SERVED, *INTEGER))}; default: no quantisation")
    add("--kv_cache_quant_algo", help="FP8; default: the compute dtype")
    add("--group_size", type=int, default=128, help="W4A16: number of inputs that share a scale")
    add("--exclude_modules", nargs="+", metavar="PATTERN", help="linear layers that are not quantised")
    add("--tp_size", type=int, default=1, help="tensor-parallel ranks; recorded for serving")
    add("--pp_size", type=int, default=1, help="pipeline stages; recorded for serving")
    add(
        "--trtllm-flags",
        action="store_true",
        help="also accept the other flags of trtllm-build that apply here",
    )
    return parser


def _check_ranks(options: argparse.Namespace) -> None:
    """Raises ConfigError unless this many ranks can share the model."""
    for name in ("tp_size", "pp_size"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name} must be at least 1, got {getattr(options, name)}")
    if options.tp_size == options.pp_size == 1:
        return
    from manylora.model.checkpoint import read_model_config
    from manylora.parallel.mapping import Mapping, check_mapping

    mapping = Mapping(options.tp_size * options.pp_size, 0, options.tp_size, options.pp_size)
    check_mapping(read_model_config(options.model_dir), mapping)


def _lora(options: argparse.Namespace) -> dict[str, Any] | None:
    """Fields of LoraConfig, with target modules resolved. None if no flag mentions adapters."""
    from manylora.config.resolve import with_whole_qkv
    from manylora.llmapi.engine_config import inferred_targets
    from manylora.llmapi.lora import LoraConfig
    from manylora.lora.formats.base_weights import BaseWeights
    from manylora.lora.modules import MODULE_NAMES
    from manylora.model.checkpoint import read_model_config

    given = [name for name in LORA if getattr(options, name) not in ([], None, "hf")]
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
