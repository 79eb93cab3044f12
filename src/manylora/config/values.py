"""Values of settings: JSON files of them, and conversion from text and YAML to their types."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from manylora.errors import ConfigError

TRUE, FALSE = ("true", "1", "t", "y", "yes"), ("false", "0", "f", "n", "no")


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Raises ConfigError in place of an OSError. path: if the error does not name a file."""
    try:
        yield
    except OSError as error:
        advice = f"; let the user of this process, uid {os.getuid()}, read it"
        raise ConfigError(
            f"{error.filename or path} cannot be read: {error.strerror}"
            + (advice if isinstance(error, PermissionError) else "")
        ) from error


def read_settings(path: Path, kind: type = dict) -> Any:
    """Empty if the file does not exist. kind: dict or list. Raises ConfigError for anything else."""
    with readable(path):
        try:
            found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else kind()
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(found, kind):
        raise ConfigError(f"{path} must hold a JSON {'object' if kind is dict else 'list'}")
    return found


def read_json(path: Path) -> dict[str, Any] | None:
    """None if the file does not exist or does not hold an object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if not isinstance(value, str) or value.lower() not in TRUE + FALSE:
        raise ValueError(f"must be true or false, got {value!r}")
    return value.lower() in TRUE


def whole_number(value: Any) -> int:
    return int(_parsed(value, int, (int, str), "a whole number"))


def _text(value: Any) -> str:
    return str(_parsed(value, str, (str,), "a text"))


def _path(value: Any) -> Path:
    return value if isinstance(value, Path) else Path(_text(value))


def _parsed(value: Any, kind: Callable[[Any], Any], accepted: tuple[type, ...], wanted: str) -> Any:
    try:
        if isinstance(value, accepted) and not isinstance(value, bool):
            return kind(value)
    except ValueError:
        pass
    raise ValueError(f"must be {wanted}, got {value!r}")


def _items(value: Any) -> list[Any]:
    """Items of a list, or of a text with commas."""
    items = [item.strip() for item in value.split(",")] if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        raise ValueError(f"must be a list, got {value!r}")
    return [item for item in items if item != ""]


CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "bool": boolean,
    "int": whole_number,
    "float": lambda value: float(_parsed(value, float, (int, float, str), "a number")),
    "str": _text,
    "Path": _path,
    "tuple[str, ...]": lambda value: tuple(map(_text, _items(value))),
    "tuple[Path, ...]": lambda value: tuple(map(_path, _items(value))),
    "list[str]": lambda value: [*map(_text, _items(value))],
    "QuantAlgo | str": _text,
}
"""Converters by a field's annotation, without `| None`. Each raises ValueError: "must be …"."""
