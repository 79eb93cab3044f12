"""Reads model parameters of a Triton repository's config.pbtxt, and converts them to an EngineConfig. Empty
text and an unfilled `${…}` mean the default.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from manylora.checkpoints.quant.config import QuantConfig
from manylora.config import foreign
from manylora.config.engine import (
    QUANT_KEYS,
    SETTINGS,
    EngineConfig,
    quant_settings,
    read_build_record,
    rename,
    resolve,
)
from manylora.config.model import stretched
from manylora.config.model_folder import model_folder
from manylora.config.settings import Setting, boolean, read_json, whole_number
from manylora.errors import ConfigError
from manylora.system.lifeline import WORLD_SIZE

logger = logging.getLogger("manylora")

Value = TypeVar("Value")
TYPES = ("v1", "V1", "inflight_batching", "inflight_fused_batching")
PARAMETERS = {row.parameter: row for row in SETTINGS if row.parameter is not None}
"""The rows of the engine's settings by the names of their parameters."""
# Parameters with an effect that are not settings of the engine.
OTHERS = (
    "FORCE_CPU_ONLY_INPUT_TENSORS", "gpt_model_type", "gpt_model_path", "executor_worker_path",
    "exclude_input_in_output", "cancellation_check_period_ms", "stats_check_period_ms",
    "max_attention_window_size", "lora_trust",
)  # fmt: skip
ENGINE = "tensorrt_llm"
COMMENT = re.compile(r"^\s*#.*$", re.MULTILINE)
PARAMETER = re.compile(r'key:\s*"(\w+)"\s*value:?\s*{\s*string_value:\s*"([^"\n]*)"')  # of config.pbtxt
QUEUE_SIZE = 1024  # default of max_queue_size, so that a flood is told and not left waiting
POSITIONS = ("max_position_embeddings", "n_positions")  # names of the longest sequence in config.json


def parameters_of(model_config: str) -> dict[str, str]:
    """Parameters in the JSON configuration that Triton passes to a model."""
    return {key: value["string_value"] for key, value in json.loads(model_config)["parameters"].items()}


def value_of(parameters: Mapping[str, str], name: str) -> str | None:
    """The parameter's text, or None if it is not set."""
    text = parameters.get(name, "").strip()
    return None if not text or text.startswith("${") else text


def flag(parameters: Mapping[str, str], name: str, default: bool) -> bool:
    found = _value(parameters, name, boolean)
    return default if found is None else found


def milliseconds(parameters: Mapping[str, str], name: str, default: int) -> float:
    """A period in seconds."""
    found = _value(parameters, name, whole_number)
    return (default if found is None else found) / 1000


def logits_dtype(model_config: Mapping[str, Any]) -> str:
    """NumPy's name for the dtype of the logits outputs. Raises ConfigError for dtypes that NumPy lacks."""
    types = {output["name"]: output["data_type"] for output in model_config["output"]}
    names = {"TYPE_FP32": "float32", "TYPE_FP16": "float16"}
    found = types.get("generation_logits", "TYPE_FP32")
    if found not in names or types.get("context_logits", found) != found:
        raise ConfigError(f"logits_datatype must be TYPE_FP32 or TYPE_FP16, got {found}")
    return names[found]


def names_file(parameters: Mapping[str, str], folder: Path) -> Path | None:
    """The parameter lora_names_file, or else vllm_backend's multi_lora.json if it exists.

    folder: of any model in the repository.
    """
    named = value_of(parameters, "lora_names_file")
    usual = folder.parent / "vllm_model" / "1" / "multi_lora.json"
    return Path(named) if named is not None else usual if usual.is_file() else None


def engine_config(
    parameters: Mapping[str, str], folder: Path | None = None, world_size: int | None = None
) -> EngineConfig:
    """Raises ConfigError that names a parameter that is missing, cannot be parsed or asks for something
    unavailable.

    folder: of the model in the repository. world_size: requested number of ranks; None: as the launcher has
    it.
    """
    kind = value_of(parameters, "gpt_model_type")
    if kind not in TYPES:
        raise ConfigError(
            "Invalid gpt_model_type. Must be v1/inflight_batching/inflight_fused_batching. "
            f"Got {kind!r} (template variable batching_strategy)"
        )
    for name, allowed in foreign.TRITON.accepted.items():
        text = value_of(parameters, name)
        if text is not None and text not in allowed:
            raise ConfigError(
                f"parameter {name} value of '{text}' is not supported; leave it empty"
                + (f" or use {' or '.join(allowed)}" if allowed else "")
            )
    path = value_of(parameters, "gpt_model_path")
    if path is None:
        raise ConfigError(
            "parameter gpt_model_path (template variable engine_dir) must name the model directory"
        )
    for name in parameters.keys() - PARAMETERS.keys() - set(foreign.TRITON) - set(OTHERS):
        if value_of(parameters, name) is not None:
            logger.warning("parameter %s has no effect here", name)
    settings = _settings(parameters)
    _divide_world(settings, world_size or os.environ.get(WORLD_SIZE), model_folder(Path(path)))
    if folder is not None:
        settings["names_file"] = names_file(parameters, folder)
    settings.setdefault("max_queue_size", QUEUE_SIZE)
    settings.pop("tokenizer_dir", None)  # only for guided decoding
    if value_of(parameters, "guided_decoding_backend") is not None:
        settings["tokenizer_dir"] = model_folder(Path(value_of(parameters, "tokenizer_dir") or path))
    model = model_folder(Path(path))
    config = resolve(model, settings)
    _check_window(parameters, model, config.max_seq_len)
    return config


def _divide_world(settings: dict[str, Any], world: int | str | None, model: Path) -> None:
    """Parallel sizes for --world_size if the parameters leave one open. If they leave both open, the sizes
    the model was built for are used if they match. Raises ConfigError.
    """
    if world is None:
        return
    tensor, pipeline, size = "tensor_parallel_size", "pipeline_parallel_size", int(world)
    built = read_build_record(model)
    if not {tensor, pipeline} & settings.keys() and built.tp_size * built.pp_size == size:
        return
    if tensor in settings:
        settings.setdefault(pipeline, max(1, size // settings[tensor]))
    stages = settings.setdefault(pipeline, 1)
    share = settings.setdefault(tensor, max(1, size // stages))
    if share * stages != size:
        raise ConfigError(
            f"--world_size must be tensor_parallel_size * pipeline_parallel_size ({share} * {stages}), "
            f"got {size}"
        )


def repository_config(repo: Path, world_size: int | None = None) -> EngineConfig:
    """The configuration of a repository's engine model, for a process that Triton does not start. Raises as
    `engine_config`.
    """
    folder = repo / ENGINE
    return engine_config(parameters_beside(folder), folder, world_size)


def quant_config(parameters: Mapping[str, str]) -> QuantConfig | None:
    """How the base model is quantised according to the parameters alone. Raises ConfigError."""
    names = {name: row for name, row in PARAMETERS.items() if row.name in QUANT_KEYS}
    return quant_settings(_settings(parameters, names))


def written_parameters(text: str) -> dict[str, str]:
    """Parameters in the text of a config.pbtxt."""
    return dict(PARAMETER.findall(COMMENT.sub("", text)))


def parameters_beside(model: Path, name: str = ENGINE) -> dict[str, str]:
    """Parameters of another model in the repository, from its config.pbtxt. Empty if it cannot be read.

    model: the folder of the calling model.
    """
    try:
        text = (model.parent / name / "config.pbtxt").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return {}
    return written_parameters(text)


def engine_context(model: Path, name: str = ENGINE) -> int | None:
    """Maximum sequence length of the engine's model in tokens, from its max_seq_len and the checkpoint's
    config.json. None: unknown, or not limited.

    model: this model's folder in the repository. name: the engine's model.
    """
    parameters = parameters_beside(model, name)
    path = value_of(parameters, "gpt_model_path")
    try:
        config = read_json(model_folder(Path(path)) / "config.json") if path else None
    except ConfigError:
        return None  # the engine's model reports what is wrong
    if config is None or config.get("is_encoder_decoder"):
        return None  # relative positions have no maximum
    longest, text = _positions(config), value_of(parameters, "max_seq_len") or ""
    limit = int(text) if text.isdecimal() else 0
    return min(longest, limit) if longest and limit else longest


def _settings(parameters: Mapping[str, str], names: Mapping[str, Setting] = PARAMETERS) -> dict[str, Any]:
    return rename({name: value_of(parameters, name) for name in names}, names, "parameter ")


def _check_window(parameters: Mapping[str, str], path: Path, max_seq_len: int | None) -> None:
    """Raises ConfigError for an attention window that is shorter than the longest sequence."""
    name = "max_attention_window_size"
    sizes = _value(parameters, name, lambda text: [whole_number(part.strip()) for part in text.split(",")])
    if sizes is None:
        return
    longest = max_seq_len or _positions(read_json(path / "config.json") or {})
    if longest is None or min(sizes) < longest:
        rest = "" if longest is None else f", or use the longest sequence's length, {longest}, or more"
        text = value_of(parameters, name)
        raise ConfigError(f"parameter {name} value of '{text}' is not supported; leave it empty{rest}")


def _positions(config: Mapping[str, Any]) -> int | None:
    """The longest sequence in tokens according to a config.json. None: not given."""
    found = [config[name] for name in POSITIONS if isinstance(config.get(name), int)]
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    try:
        return stretched(found[0], scaling) if found else None
    except (AttributeError, TypeError, ValueError):
        return None  # reading the model reports what is wrong


def _value(parameters: Mapping[str, str], name: str, convert: Callable[[str], Value]) -> Value | None:
    text = value_of(parameters, name)
    try:
        return None if text is None else convert(text)
    except ValueError as error:
        raise ConfigError(f"parameter {name} {error}") from error
