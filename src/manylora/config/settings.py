"""Setting: one row of a table of settings, by which command lines, their help, Triton's parameters and LLM's
arguments are read. Each field that `setting` makes is a row. Those of the engine are in `config.engine`.
"""

from __future__ import annotations

import json
import os
from argparse import _ActionsContainer
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
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


@dataclass(frozen=True)
class Setting:
    """What a setting is, which values it takes, and what each door calls it.

    type: its annotation. help: for --help. least, most: bounds of a number; above: the value itself is not
    allowed. choices: the only values. parse: reads one value from a text; raises ArgumentTypeError. many: the
    flag takes several values at once. named: its name in errors about its bounds.

    triton: parameter of config.pbtxt; None: there is none. llm: argument of `LLM`; PART.FIELD is a field of a
    nested config. serve: flags of `manylora serve`, separated by spaces: ours, then those of vLLM and
    trtllm-serve. llm_values, serve_values: what their values mean here, where they differ. None: not set.
    bench, build: flags of `manylora bench` and `manylora build`, with the names of trtllm-bench and
    trtllm-build.
    """

    help: str = ""
    default: Any = None
    name: str = ""
    type: str = "str"
    least: float | None = None
    most: float | None = None
    above: float | None = None
    choices: tuple[str, ...] = ()
    parse: Callable[[Any], Any] | None = None
    many: bool = False
    named: str = ""
    triton: str | None = ""
    llm: str = ""
    llm_values: dict[Any, Any] | None = None
    serve: str = ""
    serve_values: dict[Any, Any] | None = None
    bench: str = ""
    build: str = ""

    @property
    def kind(self) -> str:
        """The type of one value: bool, int, float, str, Path or another annotation."""
        return self.type.removesuffix(" | None").removeprefix("tuple[").removesuffix(", ...]")

    @property
    def repeats(self) -> bool:
        """Whether the value is a tuple, to which each use of the flag adds."""
        return self.type.startswith("tuple[")

    @property
    def parameter(self) -> str | None:
        """Name of Triton's parameter."""
        return self.name if self.triton == "" else self.triton

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of `manylora serve`, without dashes in front and with underscores."""
        return tuple(self.serve.split())

    def convert(self, value: Any) -> Any:
        """From text or from YAML. Raises ValueError: "must be …"."""
        return CONVERTERS[self.type.removesuffix(" | None")](value)

    def check(self, value: Any) -> None:
        """Raises ConfigError for a value out of bounds. None counts as not set."""
        if value is None:
            return
        name = self.named or self.name
        if self.choices and value not in self.choices:
            raise ConfigError(f"{name} must be one of {', '.join(self.choices)}, got {value!r}")
        least, most = self.least, self.most
        if self.above is not None and not self.above < value <= (most or value):
            raise ConfigError(f"{name} must be in ({self.above}, {most}], got {value}")
        if least is not None and most is not None and not least <= value <= most:
            raise ConfigError(f"{name} must be from {least} to {most}, got {value}")
        if least is not None and value < least:
            raise ConfigError(f"{name} must be at least {least}, got {value}")


def setting(default: Any, text: str, **row: Any) -> Any:
    """A field of a dataclass that is a row. row: fields of Setting; name and type are the field's."""
    return field(default=default, metadata={"setting": Setting(text, default, **row)})


def rows(kind: type) -> dict[str, Setting]:
    """The rows of a settings class by name, in the order of its fields."""
    return {
        one.name: replace(one.metadata["setting"], name=one.name, type=str(one.type))
        for one in fields(kind)
        if "setting" in one.metadata
    }


def check(settings: Any) -> None:
    """Raises ConfigError for the first value out of its row's bounds."""
    for name, row in rows(type(settings)).items():
        row.check(getattr(settings, name))


def add_flags(parser: _ActionsContainer, row: Setting, names: str, default: Any = None) -> None:
    """Add the flags of a row's value. names: separated by spaces, with underscores."""
    how: dict[str, Any] = {"nargs": "+"} if row.repeats or row.type.startswith("list[") else {}
    if kind := {"int": int, "float": float}.get(row.kind):
        how["type"] = kind
    if row.choices:
        how["choices"] = row.choices
    parser.add_argument(*(f"--{name}" for name in names.split()), default=default, help=row.help, **how)
