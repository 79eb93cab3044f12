"""AdapterRegistry: the files of each adapter id. NamedAdapters: adapters in the folders of an LLM."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from manylora.adapters.catalog.files import AdapterFolders, Fingerprint, fingerprint, is_due
from manylora.adapters.catalog.library import AdapterLibrary, task_id_of
from manylora.adapters.catalog.names import Aliases
from manylora.adapters.catalog.reader import AdapterReader
from manylora.adapters.formats.safe_files import EMBEDDED
from manylora.adapters.formats.sources import find_source
from manylora.adapters.remote.resolver import AdapterSources, Located, is_remote
from manylora.adapters.tensors import Adapter, FileAdapter
from manylora.doors.python.llm_args import LoRARequest
from manylora.errors import (
    AdapterError,
    AdapterInvalidError,
    AdapterNotCachedError,
    AdapterNotFoundError,
    ConfigError,
    printable,
)
from manylora.system.folders import temporary_folder

logger = logging.getLogger("manylora")


@dataclass
class _Named:
    request: LoRARequest
    files: Fingerprint
    looked: float


class NamedAdapters:
    """Thread-safe. A name is a path below the first root that has it, or an alias. Raises ConfigError."""

    def __init__(self, roots: Sequence[Path], aliases: Mapping[str, str]) -> None:
        self._folders = AdapterFolders(roots=roots)
        self._aliases = Aliases(aliases)
        self._lock = threading.Lock()
        self._known: dict[str, _Named] = {}

    def names(self) -> list[str]:
        return sorted(self._folders.names() | self._aliases.keys())

    def find(self, name: str, replace: Callable[[LoRARequest], None]) -> LoRARequest:
        """Changed files take effect now, by `replace`, unless broken. Raises AdapterNotFoundError."""
        meant, now = self._aliases.resolve(name), time.monotonic()
        with self._lock:
            known = self._known.get(meant)
            if known is not None and not is_due(known.looked):
                return known.request
            path = self._folders.find(meant)
            files = fingerprint(path) if path is not None else ()
            if path is None or not files:
                self._known.pop(meant, None)
                raise AdapterNotFoundError(name)
            is_same = known is not None and known.files == files
            kind = "hf"
            with suppress(AdapterError):  # files that are not an adapter raise it again when they are read
                kind = "nemo" if find_source(path).kind == "nemo" else "hf"
            made = LoRARequest(meant, task_id_of(f"name {meant}"), str(path), kind)
            if known is None:
                known = self._known[meant] = _Named(made, files, now)
            known.looked, known.files = now, files  # only one caller reads changed files
        if not is_same:
            try:
                replace(made)
            except AdapterError as error:
                shown = printable(name)
                logger.warning("adapter %s: its last good version goes on serving: %s", shown, error)
            else:
                known.request = made
        return known.request


def with_requests(given: Any, find: Any) -> Any:
    """`given` with names replaced by LoRARequests, in any nesting of lists and pairs."""
    if isinstance(given, str):
        return find(given)
    if isinstance(given, list | tuple):
        return type(given)(with_requests(one, find) for one in given)
    return given


@dataclass
class _Registered:
    path: str  # absolute, or a hub id or URL
    ckpt_source: str
    num_open: int = 0  # running requests
    accepted: bool = False  # the engine has accepted it, or may have
    labels: int | None = None  # labels of an in-memory adapter's head; None: it has a path


class AdapterRegistry:
    """Thread-safe. An id belongs to one path until it is refused, and a URL to the files first fetched."""

    def __init__(self, library: AdapterLibrary, reader: AdapterReader) -> None:
        self._library, self._reader = library, reader
        self._lock = threading.Lock()
        self._entries: dict[int, _Registered] = {}
        self._sources = AdapterSources()
        self._downloaded: dict[str, Located] = {}  # by hub id or URL
        self._labels: dict[str, int] = {}  # by place: labels of the last head that was read

    def claim(self, request: LoRARequest) -> None:
        """Bind its id to its path, until `release`. Raises AdapterInvalidError, AdapterNotCachedError."""
        task_id, source = request.lora_int_id, request.lora_ckpt_source
        path = None if request.lora_path is None else _place(request.lora_path)
        with self._lock:
            entry = self._entries.get(task_id)
            if entry is None:
                if path is None:
                    raise AdapterNotCachedError(task_id)
                entry = self._entries[task_id] = _Registered(path, source)
                self._library.register(task_id, Path(path), partial(self._read, path, source))
            elif path is not None and (path, source) != (entry.path, entry.ckpt_source):
                raise AdapterInvalidError(
                    f"lora_int_id {task_id} of {request.lora_name!r} belongs to an adapter of another "
                    "path: give each adapter an id of its own"
                )
            entry.num_open += 1

    def put(
        self, request: LoRARequest, tensors: Mapping[str, Any], config: Mapping[str, Any]
    ) -> Adapter | FileAdapter:
        """Bind the request's id to these tensors, which stay in memory. Raises AdapterInvalidError."""
        from safetensors.torch import save_file

        def as_json(value: Any) -> Any:
            """A value of PEFT's `LoraConfig.to_dict`: sets, and enumerations of text."""
            is_set = isinstance(value, set | frozenset)
            return sorted(value) if is_set else str(getattr(value, "value", value))

        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        settings = json.dumps(dict(config), default=as_json)
        with temporary_folder("tensors") as folder:
            path = folder / "adapter.safetensors"
            save_file(plain, path, {EMBEDDED: settings})
            read = self._reader.read(path)
        adapter, task_id = read.adapter, request.lora_int_id
        new = _Registered(f"tensors of {request.lora_name}", request.lora_ckpt_source)
        with self._lock:
            entry = self._entries.setdefault(task_id, new)
            entry.accepted, entry.labels = True, read.facts.labels
            self._library.register(task_id, Path(entry.path), lambda: adapter)
        return adapter

    def replace(self, request: LoRARequest) -> Adapter | FileAdapter | None:
        """Bind its id to the current content of its path. None: not in use. Raises AdapterInvalidError."""
        assert request.lora_path is not None
        task_id, path, source = request.lora_int_id, _place(request.lora_path), request.lora_ckpt_source
        with self._lock:
            if task_id not in self._entries:
                return None
        adapter = self._read(path, source)
        with self._lock:
            entry = self._entries.setdefault(task_id, _Registered(path, source))
            entry.path, entry.ckpt_source, entry.accepted, entry.labels = path, source, True, None
            self._library.register(task_id, Path(path), partial(self._read, path, source))
        return adapter

    def num_labels(self, request: LoRARequest) -> int:
        """Of the adapter's classification head, by its tensors; 0: none. Raises AdapterInvalidError."""
        with self._lock:
            entry = self._entries.get(request.lora_int_id)
            if entry is not None and entry.labels is not None:
                return entry.labels
        place = self._place_of(request)
        if place is None:
            return 0  # unknown; the request gets that error later
        if place not in self._labels:
            self._read(place, request.lora_ckpt_source)
        return self._labels[place]

    def path_of(self, request: LoRARequest) -> Path | None:
        """The path of its files. None: it came as tensors, is unknown, or is a hub id or URL."""
        place = self._place_of(request)
        return Path(place) if place is not None and place.startswith("/") else None

    def fetch(self, task_ids: Sequence[int]) -> Future[None] | None:
        """Download in the background what these ids need. None: nothing. Raises AdapterInvalidError."""
        with self._lock:
            places = [self._entries[one].path for one in task_ids]
        todo = [one for one in places if is_remote(one) and one not in self._downloaded]
        return self._sources.in_background(self._fetch, todo) if todo else None

    def _fetch(self, places: Sequence[str]) -> None:
        for place in places:
            self._local(place)

    def _local(self, place: str) -> Path:
        """Raises AdapterInvalidError."""
        found = self._downloaded.get(place)
        if found is None:
            try:
                found = self._sources.locate(place)
            except ConfigError as error:
                raise AdapterInvalidError(f"Failed to load LoRA adapter: {error}") from error
            with self._lock:
                found = self._downloaded.setdefault(place, found)
        return found.path

    def _place_of(self, request: LoRARequest) -> str | None:
        """None: the request has no path, and its id is unknown."""
        if request.lora_path is not None:
            return _place(request.lora_path)
        with self._lock:
            entry = self._entries.get(request.lora_int_id)
        return None if entry is None else entry.path

    def claim_all(self, requests: Sequence[LoRARequest]) -> None:
        """`claim` all of them, or none."""
        claimed: list[int] = []
        try:
            for request in requests:
                self.claim(request)
                claimed.append(request.lora_int_id)
        except BaseException:
            self.release(claimed, accepted=False)
            raise

    def release(self, task_ids: Sequence[int], accepted: bool) -> None:
        """To be called when a request has ended. accepted: its adapters' ids keep their paths."""
        with self._lock:
            for task_id in task_ids:
                entry = self._entries[task_id]
                entry.num_open -= 1
                entry.accepted = entry.accepted or accepted
                if not (entry.num_open or entry.accepted):
                    del self._entries[task_id]

    def _read(self, place: str, ckpt_source: str) -> Adapter | FileAdapter:
        """ckpt_source: "nemo", or "hf" for every other kind of checkpoint. Raises AdapterInvalidError."""
        path = self._local(place)
        try:
            source = find_source(path)
            if (source.kind == "nemo") != (ckpt_source == "nemo"):
                raise AdapterInvalidError(
                    f"{path.name} is not a checkpoint of kind {ckpt_source}, it is {source.kind}"
                )
            read = self._reader.read(path, source)
        except AdapterError as error:
            raise AdapterInvalidError(f"Failed to load LoRA adapter: {error}") from error
        with self._lock:
            self._labels[place] = read.facts.labels
        return read.adapter


def _place(given: str) -> str:
    """An absolute path, or a hub id or URL."""
    return str(given) if is_remote(given) else str(Path(given).resolve())
