"""NamedAdapters: adapters of an LLM that have names, in the folders it was given."""

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
from manylora.lora.library.names import name_problem
from manylora.lora.library.roots import find_adapters, path_below

LOOK_S = 1.0  # time between checks of files
SUFFIXES = ("", ".safetensors", ".nemo")

logger = logging.getLogger("manylora")


@dataclass
class _Named:
    request: LoRARequest
    files: Fingerprint
    looked: float


class NamedAdapters:
    """Thread-safe. roots: folders; a name is a path below the first one that has it. aliases: name -> its
    target. Raises ConfigError.
    """

    def __init__(self, roots: Sequence[Path], aliases: Mapping[str, str]) -> None:
        for root in roots:
            if not root.is_dir():
                raise ConfigError(f"lora_root {root} is not a directory: give folders")
        self._roots = [root.resolve() for root in roots]
        self._aliases = Aliases(aliases)
        self._lock = threading.Lock()
        self._known: dict[str, _Named] = {}

    def names(self) -> list[str]:
        """Names of everything below the roots now, and the aliases."""
        found = {name for root in self._roots for name in find_adapters(root, {}, self._roots)}
        return sorted(found | {name for name, _ in self._aliases.items()})

    def find(self, name: str, replace: Callable[[LoRARequest], None]) -> LoRARequest:
        """The request for a name. Changed files take effect now; if they are broken, the previous content
        stays.

        replace: serves the current content of a request's files if the request was served before; raises
        AdapterError. Raises AdapterNotFoundError.
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
            known.looked, known.files = now, files  # only one caller reads changed files
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
        if name_problem(name):
            return None
        for root in self._roots:
            for suffix in SUFFIXES:
                found = path_below([root], name + suffix)
                if found is not None:
                    return found[0]
        return None


def with_requests(given: Any, find: Any) -> Any:
    """`given` with names replaced by LoRARequests, in any nesting of lists and pairs."""
    if isinstance(given, str):
        return find(given)
    if isinstance(given, list | tuple):
        return type(given)(with_requests(one, find) for one in given)
    return given


def _kind(path: Path) -> str:
    """The value for `LoRARequest.lora_ckpt_source`. Files that are not an adapter raise an error when
    read.
    """
    try:
        return "nemo" if find_source(path).kind == "nemo" else "hf"
    except AdapterError:
        return "hf"
