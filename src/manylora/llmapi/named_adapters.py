"""NamedAdapters: the adapters of an LLM that have names, below the folders that it was given."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manylora.errors import AdapterError, AdapterNotFoundError, ConfigError, printable
from manylora.llmapi.lora import LoRARequest
from manylora.lora.formats.sources import find_source
from manylora.lora.library.aliases import Aliases
from manylora.lora.library.fingerprint import Fingerprint, fingerprint
from manylora.lora.library.library import task_id_of
from manylora.lora.library.names import is_name
from manylora.lora.library.roots import find_adapters, path_below

LOOK_S = 1.0  # after which files are looked at again
SUFFIXES = ("", ".safetensors", ".nemo")

logger = logging.getLogger("manylora")


@dataclass
class _Named:
    request: LoRARequest
    files: Fingerprint
    looked: float


class NamedAdapters:
    """Any thread. roots: folders; a name is a path below one, the first that has it. aliases: name -> what it
    stands for. Raises ConfigError."""

    def __init__(self, roots: Sequence[Path], aliases: Mapping[str, str]) -> None:
        for root in roots:
            if not root.is_dir():
                raise ConfigError(f"lora_root {root} is not a directory: give folders")
        self._roots = [root.resolve() for root in roots]
        self._aliases = Aliases(aliases)
        self._lock = threading.Lock()
        self._known: dict[str, _Named] = {}

    def names(self) -> list[str]:
        """Of all that lies below the roots now, and the aliases."""
        found = {name for root in self._roots for name in find_adapters(root, {}, self._roots)}
        return sorted(found | {name for name, _ in self._aliases.items()})

    def find(self, name: str, replace: Callable[[LoRARequest], None]) -> LoRARequest:
        """The request for a name. Files that have changed serve from now on; with an error in them, what they
        held before does. Raises AdapterNotFoundError.

        replace: serves what a request's files hold by now, where that was served before; raises AdapterError.
        """
        meant, now = self._aliases.resolve(name), time.monotonic()
        with self._lock:
            known = self._known.get(meant)
            if known is not None and now - known.looked < LOOK_S:
                return known.request
            path = self._path(meant)
            files = fingerprint(path) if path is not None else ()
            if path is None or not files:
                self._known.pop(meant, None)
                raise AdapterNotFoundError(name)
            is_same = known is not None and known.files == files
            made = LoRARequest(meant, task_id_of(f"name {meant}"), str(path), _kind(path))
            if known is None:
                known = self._known[meant] = _Named(made, files, now)
            known.looked, known.files = now, files  # one caller alone reads what has changed
        if not is_same:
            try:
                replace(made)
            except AdapterError as error:
                logger.warning(
                    "adapter %s: its last good version goes on serving: %s", printable(name), error
                )
            else:
                known.request = made
        return known.request

    def _path(self, name: str) -> Path | None:
        if not is_name(name):
            return None
        for root in self._roots:
            for suffix in SUFFIXES:
                found = path_below([root], name + suffix)
                if found is not None:
                    return found[0]
        return None


def with_requests(given: Any, find: Any) -> Any:
    """The same with a LoRARequest in place of each name, in whatever lists and pairs."""
    if isinstance(given, str):
        return find(given)
    if isinstance(given, list | tuple):
        return type(given)(with_requests(one, find) for one in given)
    return given


def _kind(path: Path) -> str:
    """What `LoRARequest.lora_ckpt_source` says. Files that are no adapter are told of when they are read."""
    try:
        return "nemo" if find_source(path).kind == "nemo" else "hf"
    except AdapterError:
        return "hf"
