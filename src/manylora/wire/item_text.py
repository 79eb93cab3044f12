"""ItemText: how the text of one request is processed if its adapter brings a tokenizer or defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from manylora.config.hub import model_folder
from manylora.config.repository import value_of
from manylora.errors import ConfigError, RequestError
from manylora.generation.defaults import OwnText
from manylora.generation.tokenizer import Tokenizer
from manylora.wire.server_types import Arrays
from manylora.wire.texts import utf8

TASK_ID, NAME = "LORA_TASK_ID", "LORA_NAME"  # inputs of preprocessing
TOLD = "LORA_TEXT"  # input of postprocessing: the result of `wire.encode.adapter_told`


@dataclass(frozen=True)
class ItemText:
    """end_ids, stop_ids: tokens that end an output. stop: texts that end it, if the request names none.
    sampling: defaults for fields of `SamplingConfig`.
    """

    tokenizer: Tokenizer
    end_ids: tuple[int, ...] = ()
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, own: OwnText) -> ItemText:
        fields = dict(own.defaults.fields)
        stop, stop_ids = tuple(fields.pop("stop", ())), tuple(fields.pop("stop_token_ids", ()))
        if fields.get("top_p") == 0:
            fields |= {"top_p": 1.0, "top_k": 1}  # greedy
        elif "top_k" in fields:
            fields["top_k"] = max(0, fields["top_k"])
        if fields.get("temperature") and not (fields.get("top_k") or "top_p" in fields):
            fields["top_p"] = 1.0  # the engine samples only if top_k or top_p ask for it
        return cls(own.tokenizer, own.defaults.end_ids or (), stop_ids, stop, fields)


class OwnTexts(Protocol):
    """What comes with adapters, by name or task id."""

    def find(self, name: str | None, task_id: int | None) -> OwnText | None:
        """None: use the base model's. May read files. Raises AdapterInvalidError."""

    def is_at_hand(self, name: str | None, task_id: int | None) -> bool:
        """Whether `find` reads no large file."""


def adapters_of(inputs: Arrays, count: int) -> list[tuple[str | None, int | None]]:
    """Name and task id in each item. Raises RequestError."""
    names = _column(inputs.get(NAME), NAME, count)
    ids = _column(inputs.get(TASK_ID), TASK_ID, count)
    decoded = [None if one is None else utf8(one, "lora_name") for one in names]
    return [
        (name or None, None if number is None else int(number))
        for name, number in zip(decoded, ids, strict=True)
    ]


def adapters_told(inputs: Arrays, count: int) -> list[tuple[str | None, int | None]]:
    """As `adapters_of`, from the result of `adapter_told`. Raises RequestError."""
    return [_told(one) for one in _column(inputs.get(TOLD), TOLD, count)]


def _told(given: bytes | str | None) -> tuple[str | None, int | None]:
    text = given.decode(errors="replace") if isinstance(given, bytes) else given or ""
    kind, _, value = text.partition(" ")
    if kind == "name":
        return value, None
    return None, int(value) if kind == "id" and value.isascii() and value.isdigit() else None


def _column(given: np.ndarray | None, name: str, count: int) -> list[Any]:
    if given is None:
        return [None] * count
    if given.size != count:
        raise RequestError(f"{name} must have one value for each text, got {given.size} for {count}")
    return given.reshape(-1).tolist()


def open_tokenizer(parameters: Mapping[str, str]) -> Tokenizer:
    """The tokenizer that a model's parameters name. Raises ConfigError."""
    directory = value_of(parameters, "tokenizer_dir")
    if directory is None:
        raise ConfigError("parameter tokenizer_dir must name the tokenizer's directory")
    try:
        return Tokenizer(model_folder(Path(directory)))
    except ConfigError as error:
        raise ConfigError(f"parameter tokenizer_dir: {error}") from error
