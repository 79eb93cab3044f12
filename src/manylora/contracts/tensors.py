"""Inputs of one prompt, whatever its shape, and outputs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from manylora.errors import RequestError
from manylora.request import LoraInput, LoraMix, mix
from manylora.wire.server_types import Arrays
from manylora.wire.texts import utf8


def scalar(arrays: Arrays, name: str, default: Any = None) -> Any:
    """The single value of an input; bytes as text. Raises RequestError."""
    if name not in arrays:
        return default
    array = arrays[name]
    if array.size != 1:
        raise RequestError(f"Expected a scalar tensor for tensor {name}, got {array.size} values")
    value = array.reshape(-1)[0]
    return utf8(value, name) if isinstance(value, bytes | str) else value.item()


def texts(arrays: Arrays, name: str) -> list[str]:
    """All values of an input. Raises RequestError."""
    return [utf8(value, name) for value in arrays[name].reshape(-1)] if name in arrays else []


def text_tensor(values: Iterable[str]) -> np.ndarray:
    return np.array([value.encode() for value in values], np.object_)


def read_json(text: str, name: str, most: int) -> Any:
    """The value of an input that holds JSON. most: bytes. Raises RequestError."""
    if len(text) > most:
        raise RequestError(f"{name} must have at most {most} bytes, got {len(text)}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise RequestError(f"{name} must be valid JSON, got {text!r:.80}") from None


def refuse(arrays: Mapping[str, Any], *names: str) -> None:
    """Raises RequestError for an input that is not supported."""
    for name in names:
        if name in arrays:
            raise RequestError(f"input {name} is not supported by this server: leave it out")


def named_mix(
    names: Sequence[str] | None, scales: Sequence[float] | None, field: str
) -> LoraInput | LoraMix | None:
    """Adapters that act together. scales: None: 1 each. field: the field that names them. Raises
    RequestError.
    """
    if names is None:
        raise RequestError(f"{field.replace('names', 'scales')} need lora_mix_names")
    if scales is not None and len(scales) != len(names):
        raise RequestError(f"{field} must have one of lora_mix_scales for each: {len(names)}")
    members = [LoraInput(None, name=name) for name in names]
    return mix(list(zip(members, scales or [1.0] * len(names), strict=True)), field)
