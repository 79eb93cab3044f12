"""GenerationDefaults: values from a generation_config.json for requests that do not set them. OwnText: the
defaults and the tokenizer of an adapter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any

from manylora.checkpoints.gguf.config import linked_files
from manylora.config.settings import read_settings
from manylora.errors import ConfigError
from manylora.generation.sampling import OF_DRAWING, Parameter, parameters_of
from manylora.generation.tokenizer import Tokenizer

logger = logging.getLogger("manylora")

Rule = tuple[Callable[[Any], bool], str]
"""Whether a value is valid, and what valid ones are."""
MAX_END_IDS, MAX_STOP_IDS = 64, 64
MAX_STOPS, MAX_STOP_CHARACTERS = 16, 1024
MAX_COUNT = 2**31 - 1
# Fields of a request, by transformers' names and by their own.
FIELDS = {
    **{one.name: one.name for one in parameters_of("files")},
    **{name: name for name in ("stop", "stop_token_ids", "max_tokens")},
    "stop_strings": "stop",
    "min_new_tokens": "min_tokens",
    "max_new_tokens": "max_tokens",
}
OWN = ("eos_token_id", "do_sample")
# Fields about beams, files, speed or returned values. max_length was replaced by max_new_tokens.
NEUTRAL = {
    "transformers_version", "bos_token_id", "pad_token_id", "decoder_start_token_id", "max_length",
    "min_length", "length_penalty", "early_stopping", "use_cache", "cache_implementation", "cache_config",
    "return_legacy_cache", "return_dict_in_generate", "renormalize_logits", "remove_invalid_values",
    "compile_config", "disable_compile", "low_memory", "prefill_chunk_size", "trust_remote_code",
    "prompt_lookup_num_tokens", "max_matching_ngram_size", "is_assistant", "target_lookbehind",
    "generation_kwargs", "auto_map", "chat_format", "max_window_size",
}  # fmt: skip
NEUTRAL_PREFIXES = ("_", "output_", "assistant_", "num_assistant_")
FILE = "generation_config.json"
NONE = "vllm"  # vLLM's word for: do not read the model's file
# llama.cpp's own defaults: its files have none, and small models fall apart at temperature 1 without cuts.
LLAMA_CPP: Mapping[str, Any] = MappingProxyType(
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
)
OFF: tuple[Any, ...] = (None, False, 0, "", [], {})  # values without effect
OFF_AT_ONE = {
    "num_beams", "num_beam_groups", "num_return_sequences", "guidance_scale",
    "encoder_repetition_penalty",
}  # fmt: skip


@dataclass(frozen=True)
class GenerationDefaults:
    """fields: those that are set. max_tokens: new ones; None: the usual. end_ids: None: the model's."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    end_ids: tuple[int, ...] | None = None

    @classmethod
    def parse(cls, given: Any, vocab_size: int) -> GenerationDefaults:
        """given: content of the file. Raises ValueError that says what is wrong."""
        if not isinstance(given, dict):
            raise ValueError("it must be a JSON object")
        found = {FIELDS[name]: value for name, value in given.items() if name in FIELDS and value is not None}
        for name, value in given.items():
            known = name in (*FIELDS, *NEUTRAL, "eos_token_id", "do_sample") or name.startswith(
                NEUTRAL_PREFIXES
            )
            is_off = any(value == one for one in OFF) or (name in OFF_AT_ONE and value == 1)
            if not (known or is_off):
                raise ValueError(f"{name[:60]} is not supported")
        if given.get("do_sample") is False:
            found["temperature"] = 0.0
        if isinstance(found.get("stop"), str):
            found["stop"] = [found["stop"]]
        for name, value in found.items():
            is_right, must = RULES[name]
            if not is_right(value):
                raise ValueError(f"{name} must be {must}, got {str(value)[:40]!r}")
        ends = given.get("eos_token_id")
        ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
        if len(ends) > MAX_END_IDS or not _are_ids(ends):
            raise ValueError(f"eos_token_id must be a token id, or at most {MAX_END_IDS} in a list")
        ids = [*found.get("stop_token_ids", ()), *ends]
        if max(ids, default=0) >= vocab_size:
            raise ValueError(f"{max(ids)} is no token of the model, which has {vocab_size}")
        max_tokens = found.pop("max_tokens", None)
        if max_tokens == 0:
            raise ValueError("max_new_tokens must be at least 1")
        return cls(found, max_tokens, tuple(dict.fromkeys(ends)) or None)

    def over(self, base: GenerationDefaults) -> GenerationDefaults:
        """These, and those of `base` where they are not set."""
        end_ids = base.end_ids if self.end_ids is None else self.end_ids
        return GenerationDefaults({**base.fields, **self.fields}, self.max_tokens or base.max_tokens, end_ids)


NO_DEFAULTS = GenerationDefaults()


@dataclass(frozen=True)
class OwnText:
    """How the text of one request with an adapter is processed. tokenizer: with its chat template."""

    tokenizer: Tokenizer
    defaults: GenerationDefaults


def _rule(parameter: Parameter) -> Rule:
    least, most = parameter.least or 0, parameter.most or 0
    if parameter.kind is bool:
        return lambda v: isinstance(v, bool), "true or false"
    if parameter.kind is int:
        must = f"a whole number of at least {int(least)}"
        return lambda v: type(v) is int and least <= v <= MAX_COUNT, must
    must = f"a number from {least:g} to {most:g}"
    return lambda v: type(v) in (int, float) and isfinite(v) and least <= v <= most, must


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int and 0 <= one <= MAX_COUNT for one in value)


RULES: dict[str, Rule] = {
    **{one.name: _rule(one) for one in parameters_of("files")},
    "max_tokens": _rule(Parameter("max_tokens", int)),
    "stop": (
        lambda v: (
            isinstance(v, list)
            and len(v) <= MAX_STOPS
            and all(isinstance(one, str) and 0 < len(one) <= MAX_STOP_CHARACTERS for one in v)
        ),
        f"a text, or at most {MAX_STOPS}, of 1 to {MAX_STOP_CHARACTERS} characters",
    ),
    "stop_token_ids": (
        lambda v: _are_ids(v) and len(v) <= MAX_STOP_IDS,
        f"a list of at most {MAX_STOP_IDS} token ids",
    ),
}


def model_defaults(
    folder: Path, vocab_size: int, source: str = "auto", override: Mapping[str, Any] | None = None
) -> GenerationDefaults:
    """source: auto (the file of the model in `folder`; for a GGUF file that says nothing, LLAMA_CPP), vllm
    (none), or a folder with a generation_config.json. override: settings that replace those.

    Unsupported settings of the model's own file are left out and logged. Raises ConfigError for others.
    """
    found: dict[str, Any] = {}
    if source == "auto":
        for name, value in read_settings(folder / FILE).items():
            try:
                GenerationDefaults.parse({name: value}, vocab_size)
                found[name] = value
            except ValueError as error:
                logger.warning("the model's %s: %s: it is not used", FILE, error)
        if linked_files(folder) and not any(name in found for name in (*OF_DRAWING, "do_sample")):
            found |= LLAMA_CPP
    elif source != NONE:
        if not (Path(source) / FILE).is_file():
            raise ConfigError(
                f"generation_config {source} has no {FILE}: give auto, vllm, or a folder that has one"
            )
        found = read_settings(Path(source) / FILE)
        _parse(found, vocab_size, f"generation_config {Path(source) / FILE}")
    override = override or {}
    if "temperature" in override and "do_sample" not in override:
        found.pop("do_sample", None)  # false would mean temperature 0
    return _parse({**found, **override}, vocab_size, "override_generation_config")


def _parse(given: Mapping[str, Any], vocab_size: int, what: str) -> GenerationDefaults:
    try:
        return GenerationDefaults.parse(dict(given), vocab_size)
    except ValueError as error:
        raise ConfigError(f"{what}: {error}") from error
