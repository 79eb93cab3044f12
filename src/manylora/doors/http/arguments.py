"""Reads the command line of `manylora serve` and its YAML file into ServeOptions."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from manylora.checkpoints.quant.config import INTEGER, SERVED
from manylora.config.engine import SETTINGS
from manylora.config.foreign import ONE_COPY, SERVE, SERVE_SWITCHES, SERVE_VARIABLES
from manylora.config.settings import CONVERTERS, Setting, rows
from manylora.doors.http.options import LLM_ARGUMENTS, ServeOptions, json_object
from manylora.doors.python import options as llm
from manylora.errors import ConfigError
from manylora.system.command_line import Parser
from manylora.version import __version__

logger = logging.getLogger("manylora")

HELP = "YAML file; its keys are the flags with underscores"
CONFIG = Setting(HELP, name="config", type="Path", serve="config extra_llm_api_options")
EXPERTS = "enable_expert_parallel"
# The engine's settings with a flag, and two flags of vLLM's that stand for other values of a setting.
ENGINE_ROWS = (
    *(row for row in SETTINGS if row.serve),
    Setting(
        "divide whole experts among the ranks", type="bool", llm="moe_expert_parallel_size", serve=EXPERTS
    ),
    Setting(
        "n-gram drafts, as JSON", parse=json_object, llm="speculative_config", serve="speculative_config"
    ),
)
ENGINE_FLAGS = {flag: row for row in ENGINE_ROWS for flag in row.flags}
SIZES = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}
# Fields of peft_cache_config that are options of the server, because it reads the adapters itself.
CACHE_OPTIONS = {
    "lora_prefetch_dir": "lora_root",
    "disk_cache_dir": "lora_disk_dir",
    "disk_cache_size": "lora_disk_bytes",
}
# The sections of --help, each with its first option: options are in the order of their fields.
SECTIONS = {
    "host": "address",
    "served_model_name": "model",
    "lora_modules": "adapters",
    "api_keys": "access",
    "max_request_bytes": "limits",
    "drain_seconds": "running",
    "replicas": "fleet",
}
LAST_OF_MODEL = "triton_model"  # the section of the engine follows
SHORT = {
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
    "data_parallel_size": "-dp",
    "quantization": "-q",
}
OWN_FORMAT = "leave it out for a quantised checkpoint: its own format is detected"
READERS = {"int": CONVERTERS["int"], "float": CONVERTERS["float"], "Path": Path}  # of values in files
METAVARS = {"int": "N", "float": "N", "Path": "PATH"}
EXAMPLES = """examples:
  manylora {command} MODEL --lora-root FOLDER               each subfolder of FOLDER is an adapter
  manylora {command} ORG/NAME --lora-modules sql=ORG/NAME   model and adapter from the Hugging Face hub

Flags may be spelt with dashes or underscores, and those of vllm serve and trtllm-serve work too. The same
options can be set in a YAML file: --config FILE."""

OptionsT = TypeVar("OptionsT", bound=ServeOptions)


def parse_options(arguments: Sequence[str]) -> ServeOptions:
    """Options from the command line, which overrides the file it names. Raises ConfigError."""
    return parse(arguments, ServeOptions, "serve", "Serve a model and its adapters over the OpenAI API.")


def parse(
    arguments: Sequence[str],
    kind: type[OptionsT],
    command: str,
    purpose: str,
    refused: Collection[str] = (),
    usage: str = "",
) -> OptionsT:
    """The same for a command with more options than the server. refused: options it does not accept, with the
    reason; they are left out of its help. usage: the first line of its help, if other arguments come before.
    """
    parser = Parser(
        prog=f"manylora {command}",
        usage=usage or f"manylora {command} MODEL [options]",
        description=purpose,
        epilog=EXAMPLES.format(command=command),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = "Hugging Face folder, or hub id: org/name[@revision]"
    parser.add_argument("model", nargs="?", metavar="MODEL", help=what)
    parser.add_argument("--model", dest="model_flag", help=argparse.SUPPRESS)
    parser.add_argument("--version", action="version", version=f"manylora {__version__}")
    _add_row(parser, CONFIG, CONFIG.help, metavar="FILE")
    groups: dict[str, argparse._ActionsContainer] = {}
    title = ""
    for row in rows(kind).values():
        title = SECTIONS.get(row.name, title)
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        text = row.help + _default(row.default)
        _add_row(groups[title], row, argparse.SUPPRESS if row.name in refused else text)
        if row.name == LAST_OF_MODEL:
            groups["engine"] = parser.add_argument_group("engine")
    _add_engine(groups["engine"], groups["adapters"])
    given = vars(parser.parse_args(arguments))
    positional, flag = given.pop("model"), given.pop("model_flag")
    file = given.pop("config", None)
    settings = _settings({} if file is None else llm.read_options(file), given, file, kind)
    model = positional or flag or settings.pop("model", None)
    if model is None:
        parser.error(f"MODEL is missing: manylora {command} MODEL [options], with MODEL first")
    made = kind(model, **{name: value for name, value in settings.items() if name != "model"})
    for name, flag in SERVE_VARIABLES.items():
        if not os.environ.get(name):
            continue
        if flag == "--api-key" and not (made.api_key or made.api_keys):  # the operator relies on it
            raise ConfigError(f"{name} is set but not read here: give {flag}, or unset it to serve anybody")
        logger.warning("%s is set but not read here: the flag is %s", name, flag)
    return made


def options_of(settings: Mapping[str, Any], kind: type[OptionsT]) -> OptionsT:
    """Options from the keys of an option file that is already in memory. Raises ConfigError."""
    found = _settings(settings, {}, None, kind)
    if "model" not in found:
        raise ConfigError("model is missing: a folder, or an id of the hub")
    return kind(**found)


def _default(value: Any) -> str:
    return "" if value in (None, ()) or isinstance(value, bool) else f" (default: {value})"


def _add_engine(engine: argparse._ActionsContainer, adapters: argparse._ActionsContainer) -> None:
    """The flags of the engine's settings, and those of other programs that are hidden."""
    for row in ENGINE_ROWS:
        default = _default(llm.DEFAULTS.get(row.name, row.default))
        file = "" if row.llm in row.flags else f"; in the file {row.llm}"
        _add_row(adapters if row.llm.startswith("lora_config.") else engine, row, row.help + default + file)
    for name in SERVE_SWITCHES:
        _add(engine, (name,), action=argparse.BooleanOptionalAction, help=argparse.SUPPRESS)
    for name in (*SERVE.ignored, *SERVE.accepted):
        _add(engine, (name,), help=argparse.SUPPRESS)
    for name in SERVE.refused:
        _add(engine, (name,), nargs="*", help=argparse.SUPPRESS)


def _add_row(parser: argparse._ActionsContainer, row: Setting, text: str, metavar: str = "") -> None:
    """Add the flags of a row, which override a file only where they are given."""
    how: dict[str, Any] = {"help": text}
    if row.kind == "bool":
        how["action"] = argparse.BooleanOptionalAction
    else:
        types: dict[str, Any] = {"int": _whole, "float": float, "Path": Path}
        how["type"] = row.parse or types.get(row.kind, str)
        how["metavar"] = metavar or METAVARS.get(row.kind, "X")
    if row.repeats:
        how |= {"action": "extend", "nargs": "+"} if row.many else {"action": "append"}
    _add(parser, row.flags or (row.name,), **how)


def _add(parser: argparse._ActionsContainer, names: tuple[str, ...], **how: Any) -> None:
    """Add a flag under all its names, without a default."""
    short = [SHORT[names[0]]] if names[0] in SHORT else []
    flags = [f"--{name.replace('_', '-')}" for name in names]
    parser.add_argument(*short, *flags, dest=names[0], default=argparse.SUPPRESS, **how)


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
    """Fields of the options class, and the model if the file at `path` names it. Raises ConfigError."""
    own, engine = _take_engine(flags)
    settings = {name: tuple(value) if isinstance(value, list) else value for name, value in own.items()}
    try:
        found = {str(key).replace("-", "_"): value for key, value in file.items() if value is not None}
        found, engine_of_file = _take_engine(found)
        for argument, value in (engine_of_file | engine).items():
            part, _, name = argument.rpartition(".")
            if not part:
                found[name] = value
            elif isinstance(found.setdefault(part, {}), dict):
                found[part] = {**found[part], name: value}
        return _of_file(found, kind) | settings
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}" if path else str(error)) from error


def _take_engine(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """given: by flag. Returns what is left, and arguments of `LLM` (PART.FIELD if nested)."""
    left, found = dict[str, Any](), dict[str, Any]()
    for name, value in given.items():
        if name in SERVE or name in SERVE_SWITCHES:
            _check_foreign(name, value)
        elif name in ENGINE_FLAGS and name != EXPERTS:
            row = ENGINE_FLAGS[name]
            if row.serve_values is not None and isinstance(value, str | bool):
                value = row.serve_values.get(value, value)
            if name == "quantization" and value not in (None, *SERVED, *INTEGER):
                known = ", ".join((*SERVED, *INTEGER))
                raise ConfigError(f"--quantization must be one of {known}, got {value}; {OWN_FORMAT}")
            if value is not None:
                found[row.llm] = value
        elif name != EXPERTS:
            left[name] = value
    if given.get(EXPERTS):  # vLLM's flag means one group of experts per tensor-parallel rank
        flag, ranks = "--enable-expert-parallel", found.get("tensor_parallel_size")
        if ranks is None:
            raise ConfigError(f"{flag} divides experts among the ranks of --tensor-parallel-size: give both")
        if found.setdefault("moe_expert_parallel_size", ranks) != ranks:
            asked = found["moe_expert_parallel_size"]
            raise ConfigError(f"{flag} means --ep-size {ranks}, got {asked}: give one of them")
    return left, found


def _check_foreign(name: str, value: Any) -> None:
    """Raises ConfigError for a flag of another program that would change something."""
    flag = f"--{name.replace('_', '-')}"
    if name in SERVE.refused:
        raise ConfigError(f"{flag} is not taken here: {SERVE.refused[name]}")
    if SERVE.allows(name, value) or SERVE_SWITCHES.allows(name, value):
        return
    if name == "enable_lora":
        raise ConfigError("adapters are always served: leave --no-enable-lora out")
    accepted = SERVE.accepted[name]
    if accepted == ("1",):
        raise ConfigError(f"{flag} must be 1, got {value}: {ONE_COPY}")
    instead = f"leave it out, or give {' or '.join(accepted)}"
    raise ConfigError(f"{flag} {value} has no counterpart here: {instead}")


def _of_file(found: Mapping[str, Any], kind: type[ServeOptions]) -> dict[str, Any]:
    """found: values by option, and arguments of `LLM`. Raises ConfigError."""
    own = {flag: row for row in rows(kind).values() for flag in row.flags or (row.name,)}
    llm.check_names("option", found, [*own, "model", *LLM_ARGUMENTS, *ENGINE_FLAGS])
    settings: dict[str, Any] = {"model": str(found["model"])} if "model" in found else {}
    arguments = {name: value for name, value in found.items() if name not in own and name != "model"}
    given = [(own[name], value) for name, value in found.items() if name in own]
    cache = arguments.get("peft_cache_config")
    if isinstance(cache, dict):
        given += [(own[to], cache[one]) for one, to in CACHE_OPTIONS.items() if cache.get(one) is not None]
        arguments["peft_cache_config"] = {one: cache[one] for one in cache if one not in CACHE_OPTIONS}
    for row, value in given:
        made = _convert(row, value)
        settings[row.name] = (*settings.get(row.name, ()), *made) if row.repeats else made
    for name in arguments.keys() & llm.ARGUMENTS.keys():
        try:
            arguments[name] = llm.ARGUMENTS[name].convert(arguments[name])
        except ValueError as error:
            raise ConfigError(f"{name} {error}") from error
    sections = llm.llm_arguments(arguments)
    llm.check_known({name: value for name, value in sections.items() if name not in llm.KNOWN})
    return settings | {"sections": sections}


def _convert(row: Setting, value: Any) -> Any:
    """An option's value in a file. Raises ConfigError."""
    convert = row.parse or READERS.get(row.kind, str)
    try:
        if row.kind == "bool":
            if not isinstance(value, bool):
                raise ValueError("must be true or false")
            return value
        if row.repeats:
            return tuple(convert(item) for item in (value if isinstance(value, list) else [value]))
        return convert(value)
    except (TypeError, ValueError, argparse.ArgumentTypeError) as error:
        raise ConfigError(f"{row.name} {error}") from error
