"""Reads the command line of `manylora serve` and its YAML file into ServeOptions."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

from manylora.config.engine import EngineConfig
from manylora.config.values import CONVERTERS
from manylora.errors import ConfigError
from manylora.llmapi import options as llm
from manylora.openai import other_flags
from manylora.openai.options import LLM_ARGUMENTS, ServeOptions
from manylora.system.command_line import Parser
from manylora.version import __version__

logger = logging.getLogger("manylora")

# vLLM's names, and TensorRT-LLM's.
ALIASES = {
    "lora_root": ("lora_prefetch_dir",),
    "max_seq_len": ("max_model_len",),
    "max_batch_size": ("max_num_seqs",),
    "max_num_tokens": ("max_num_batched_tokens",),
    "config": ("extra_llm_api_options",),
}
MANY = ("served_model_name", "lora_modules", "api_key")  # flags that take several values at once, as vLLM's
SIZES = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}
# Fields of peft_cache_config that are options of the server, because it reads the adapters itself.
CACHE_OPTIONS = {
    "lora_prefetch_dir": "lora_root",
    "disk_cache_dir": "lora_disk_dir",
    "disk_cache_size": "lora_disk_bytes",
}


OptionsT = TypeVar("OptionsT", bound=ServeOptions)


# The sections of --help, each with its first option: options are in the order of their fields.
SECTIONS = {
    "host": "address",
    "served_model_name": "model",
    "device": "engine",
    "lora_modules": "adapters",
    "api_keys": "access",
    "max_request_bytes": "limits",
    "drain_seconds": "running",
    "replicas": "fleet",
}
METAVARS = {int: "N", float: "N", Path: "PATH"}
EXAMPLES = """examples:
  manylora {command} MODEL --lora-root FOLDER               each subfolder of FOLDER is an adapter
  manylora {command} ORG/NAME --lora-modules sql=ORG/NAME   model and adapter from the Hugging Face hub

Flags may be spelt with dashes or underscores, and those of vllm serve and trtllm-serve work too. The same
options can be set in a YAML file: --config FILE."""


def parse_options(arguments: Sequence[str]) -> ServeOptions:
    """Options from the command line, which overrides the file it names. Raises ConfigError; argparse may
    exit.
    """
    return parse(arguments, ServeOptions, "serve", "Serve a model and its adapters over the OpenAI API.")


def parse(
    arguments: Sequence[str],
    kind: type[OptionsT],
    command: str,
    purpose: str,
    refused: Collection[str] = (),
) -> OptionsT:
    """The same for a command with more options than the server. refused: options it does not accept, with the
    reason; they are left out of its help.
    """
    parser = Parser(
        prog=f"manylora {command}",
        usage=f"manylora {command} MODEL [options]",
        description=purpose,
        epilog=EXAMPLES.format(command=command),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="Hugging Face folder, or hub id: org/name[@revision]"
    )
    parser.add_argument("--model", dest="model_flag", help=argparse.SUPPRESS)
    parser.add_argument("--version", action="version", version=f"manylora {__version__}")
    _add(
        parser, "config", type=Path, metavar="FILE", help="YAML file; its keys are the flags with underscores"
    )
    sections, section = dict[str, argparse._ArgumentGroup](), ""
    for one in fields(kind):
        if one.metadata:
            section = SECTIONS.get(one.name, section)
            if section not in sections:
                sections[section] = parser.add_argument_group(section)
            _add_option(sections[section], one, hidden=one.name in refused)
    _add_other(sections["engine"], sections["adapters"])
    given = vars(parser.parse_args(arguments))
    positional, flag = given.pop("model"), given.pop("model_flag")
    file = given.pop("config", None)
    settings = _settings({} if file is None else llm.read_options(file), given, file, kind)
    model = positional or flag or settings.pop("model", None)
    if model is None:
        parser.error(f"MODEL is missing: manylora {command} MODEL [options], with MODEL first")
    made = kind(model, **{name: value for name, value in settings.items() if name != "model"})
    _check_variables(made)
    return made


def _check_variables(options: ServeOptions) -> None:
    """Raises ConfigError for a key that the operator relies on and that nobody would be asked for."""
    for name, flag in other_flags.VARIABLES.items():
        if not os.environ.get(name):
            continue
        if flag == "--api-key" and not (options.api_key or options.api_keys):
            raise ConfigError(f"{name} is set but not read here: give {flag}, or unset it to serve anybody")
        logger.warning("%s is set but not read here: the flag is %s", name, flag)


def options_of(settings: Mapping[str, Any], kind: type[OptionsT]) -> OptionsT:
    """Options from the keys of an option file that is already in memory. Raises ConfigError."""
    found = _settings(settings, {}, None, kind)
    if "model" not in found:
        raise ConfigError("model is missing: a folder, or an id of the hub")
    return kind(**found)


def _add_option(parser: argparse._ArgumentGroup, one: Any, *, hidden: bool) -> None:
    kind, text = one.metadata["kind"], one.metadata["help"]
    metavar = METAVARS.get(kind, "X")
    if hidden:
        text = argparse.SUPPRESS
    if kind is bool:
        _add(parser, one.name, action=argparse.BooleanOptionalAction, help=text)
    elif isinstance(one.default, tuple):
        how = {"action": "extend", "nargs": "+"} if one.name in MANY else {"action": "append"}
        _add(parser, one.name, type=kind, metavar=metavar, help=text, **how)
    else:
        default = getattr(EngineConfig, one.name, None) if one.default is None else one.default
        shown = "" if hidden or default in (None, MISSING) else f" (default: {default})"
        kind = _whole if kind is int else kind
        _add(parser, one.name, type=kind, metavar=metavar, help=text + shown)


def _add_other(engine: argparse._ArgumentGroup, adapters: argparse._ArgumentGroup) -> None:
    for name, (kind, target, meaning) in other_flags.FIELDS.items():
        parser = adapters if target.startswith("lora_config.") else engine
        text = f"{meaning}; in the file {target}"
        if kind is bool:
            _add(parser, name, action=argparse.BooleanOptionalAction, help=text)
        else:
            metavar, kind = METAVARS.get(kind, "X"), _whole if kind is int else kind  # type: ignore[call-overload]
            _add(parser, name, type=kind, metavar=metavar, help=text)
    for name in other_flags.NEUTRAL:
        _add(engine, name, action=argparse.BooleanOptionalAction, help=argparse.SUPPRESS)
    for name in other_flags.NEUTRAL_VALUES:
        _add(engine, name, help=argparse.SUPPRESS)
    for name in other_flags.REFUSED:
        _add(engine, name, nargs="*", help=argparse.SUPPRESS)


def _add(parser: argparse._ActionsContainer, name: str, **how: Any) -> None:
    """Add a flag under all its names."""
    flags = [f"--{one.replace('_', '-')}" for one in (name, *ALIASES.get(name, ()))]
    short = [other_flags.SHORT[name]] if name in other_flags.SHORT else []
    parser.add_argument(*short, *flags, dest=name, default=argparse.SUPPRESS, **how)


def _whole(text: str) -> int:
    """A whole number, also in vLLM's form: 32k is 32000, 32K is 32768."""
    unit = SIZES.get(text[-1:], 1)
    try:
        return int(float(text[:-1]) * unit) if unit > 1 else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None


def _settings(
    file: Mapping[str, Any], flags: Mapping[str, Any], path: Path | None, kind: type[ServeOptions]
) -> dict[str, Any]:
    """Fields of the options class, and the model if the file names it. path: of the file. Raises
    ConfigError.
    """
    own, parts = other_flags.take(flags)
    settings = {name: tuple(value) if isinstance(value, list) else value for name, value in own.items()}
    try:
        found = {str(key).replace("-", "_"): value for key, value in file.items() if value is not None}
        found, more = other_flags.take(found)
        for target, value in (more | parts).items():
            part, _, name = target.rpartition(".")
            if part and isinstance(found.setdefault(part, {}), dict):
                found[part] = {**found[part], name: value}
            elif not part:
                found[name] = value
        return _of_file(found, kind) | settings
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}" if path else str(error)) from error


def _of_file(found: Mapping[str, Any], kind: type[ServeOptions]) -> dict[str, Any]:
    """Raises ConfigError."""
    known = {one.name: one for one in fields(kind) if one.metadata}
    llm.check_names("option", found, [*known, "model", *LLM_ARGUMENTS, *sum(ALIASES.values(), ())])
    given: list[tuple[str, Any]] = []
    for key, value in found.items():
        name = next((name for name, others in ALIASES.items() if key in others), key)
        if name == "peft_cache_config" and isinstance(value, dict):
            given += [(to, value[one]) for one, to in CACHE_OPTIONS.items() if value.get(one) is not None]
            value = {one: value[one] for one in value if one not in CACHE_OPTIONS}
        given.append((name, value))
    own = {*known, "model"}
    sections = llm.llm_arguments({name: value for name, value in given if name not in own})
    llm.check_known({name: value for name, value in sections.items() if name in llm.NEUTRAL})
    settings: dict[str, Any] = {"model": str(found["model"])} if "model" in found else {}
    for name, value in given:
        if name in known:
            made = _convert(name, value, known[name])
            settings[name] = (*settings.get(name, ()), *made) if isinstance(made, tuple) else made
    return settings | {"sections": sections}


def _convert(name: str, value: Any, one: Any) -> Any:
    kind = one.metadata["kind"]
    convert = CONVERTERS[kind.__name__] if kind in (int, float) else kind
    try:
        if kind is bool and not isinstance(value, bool):
            raise ValueError("must be true or false")
        if isinstance(one.default, tuple):
            return tuple(convert(item) for item in (value if isinstance(value, list) else [value]))
        return convert(value)
    except (TypeError, ValueError, argparse.ArgumentTypeError) as error:
        raise ConfigError(f"{name} {error}") from error
