"""Names that models and adapters may have, aliases, and names with folders from multi_lora.json."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from manylora.errors import ConfigError

NAME = re.compile(r"[A-Za-z0-9._:/-]{1,128}")
MAX_BYTES = 2**24
MAX_LENGTH = 128  # of a name
MAX_FOLDERS = 5  # of a name; a scan of a folder looks as deep
MAX_ALIASES = 65536
LATEST = ":latest"  # the tag that Ollama's clients add to any name


def is_name(name: str) -> bool:
    """Whether a request may contain it. Names appear in URLs, paths and metric labels. As a path, a name has
    no empty, "." or ".." part, so it cannot leave a root.
    """
    parts = name.split("/")
    return bool(NAME.fullmatch(name)) and ".." not in name and "" not in parts and "." not in parts


def is_folder_name(name: str) -> bool:
    """Whether it is the name of one visible folder, and no path below a root."""
    return is_name(name) and "/" not in name and not name.startswith(".")


def name_problem(name: str, bases: Sequence[str] = ()) -> str:
    """Why no adapter may have this name; "": one may.

    An adapter must be found again under its name when its folder is scanned, and no name may be a form in
    which requests name something else: otherwise who loads an adapter could answer for another model.

    bases: the base model's names and paths.
    """
    parts = name.split("/")
    if not is_name(name):
        return f"names are 1 to {MAX_LENGTH} of A-Z a-z 0-9 . _ : / - without '..' and empty parts"
    if any(part.startswith(".") for part in parts):
        return "a name, or a part of it behind a slash, that begins with a dot is that of a hidden file"
    if len(parts) > MAX_FOLDERS + 1:
        return f"a name may be {MAX_FOLDERS} folders deep"
    if name.endswith(LATEST):
        return f"NAME{LATEST} means the model NAME for Ollama's clients"
    if name in bases:
        return "it is the name of the base model"
    if any(name.startswith(f"{base}:") for base in bases):
        return "BASE:ADAPTER means an adapter of the base model"
    return ""


def read_names(file: Path) -> dict[str, Path]:
    """A relative path is looked up beside the file, then in the working directory. Raises ConfigError."""
    try:
        is_large = file.stat().st_size > MAX_BYTES
        given = None if is_large else json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from error
    if is_large:
        raise ConfigError(f"{file} has more than {MAX_BYTES} bytes")
    if not isinstance(given, dict):
        raise ConfigError(f"{file} must be an object of names and folders")
    found = {}
    for name, folder in given.items():
        if not (0 < len(name) <= MAX_LENGTH and name.isprintable() and isinstance(folder, str) and folder):
            raise ConfigError(f"{file}: {name!r:.140} must be a name of an adapter, with its folder as text")
        beside = file.resolve().parent / folder
        found[name] = beside if beside.is_dir() else Path(folder).absolute()
    return found


class Aliases(dict[str, str]):
    """name -> target, which may itself be an alias; whoever adds one checks `has_room_for` and `leads_to`.

    given: the first ones. Raises ConfigError for a cycle.
    """

    def __init__(self, given: Mapping[str, str]) -> None:
        super().__init__()
        for name, target in given.items():
            if self.leads_to(target, name):
                raise ConfigError(f"lora_alias: {name}={target} leads back to itself")
            self[name] = target

    def resolved(self) -> list[tuple[str, str]]:
        """Each alias with its final target."""
        return [(name, self.resolve(name)) for name in sorted(self)]

    def resolve(self, name: str) -> str:
        """The final target of a name. A name that is not an alias is returned as it is."""
        while name in self:
            name = self[name]
        return name

    def has_room_for(self, name: str) -> bool:
        return name in self or len(self) < MAX_ALIASES

    def leads_to(self, name: str, end: str) -> bool:
        """Whether a name resolves to another, or equals it."""
        while name != end and name in self:
            name = self[name]
        return name == end
