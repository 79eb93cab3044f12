"""Catalog: task ids to digests, digests to where their adapter can be read again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from manylora.errors import AdapterError, AdapterInvalidError
from manylora.lora.formats.npy import has_npy, read_npy
from manylora.lora.formats.peft import has_peft, read_peft
from manylora.lora.tensors import Adapter, pack_rows
from manylora.request import LoraInput

__all__ = ["Catalog", "read_adapter_folder"]

logger = logging.getLogger("manylora")

Check = Callable[[LoraInput], Adapter]


class Catalog:
    """check: makes an Adapter of tensors, or raises AdapterError. Lookups are safe from any thread."""

    def __init__(self, check: Check) -> None:
        self._check = check
        self._digests: dict[int, str] = {}
        self._sources: dict[int, tuple[str, Path]] = {}  # task id -> digest read, and folder

    def bind(self, task_id: int, digest: str) -> None:
        self._digests[task_id] = digest

    def digest(self, task_id: int) -> str | None:
        return self._digests.get(task_id)

    def reload(self, task_id: int) -> Adapter | None:
        """Read an adapter again from its folder. None when it came over the wire, or was replaced by that."""
        source = self._sources.get(task_id)
        if source is None or source[0] != self._digests.get(task_id):
            return None
        adapter = self._read(task_id, source[1])
        self._sources[task_id] = (adapter.digest, source[1])
        return adapter

    def prefetch(self, folder: Path) -> Iterator[tuple[int, Adapter]]:
        """The adapters of <folder>/<task id>/. A bad one is skipped with a warning that says why."""
        if not folder.is_dir():
            logger.warning("lora_prefetch_dir %s does not exist: nothing is prefetched", folder)
            return
        for entry in sorted(folder.iterdir(), key=lambda path: (len(path.name), path.name)):
            if not entry.is_dir():
                continue
            if not (entry.name.isascii() and entry.name.isdigit() and int(entry.name) < 2**64):
                logger.warning(
                    "lora task name %s is invalid, skipping to load lora weight from this folder.", entry.name
                )
                continue
            task_id = int(entry.name)
            try:
                adapter = self._read(task_id, entry)
            except AdapterError as error:
                logger.warning("lora task %s is skipped: %s", entry.name, error)
                continue
            self._sources[task_id] = (adapter.digest, entry)
            self.bind(task_id, adapter.digest)
            yield task_id, adapter

    def _read(self, task_id: int, folder: Path) -> Adapter:
        weights, config = read_adapter_folder(folder)
        return self._check(LoraInput(task_id, weights, config))


def read_adapter_folder(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Weights [1, rows, W] and config [1, rows, 3 or 4] of a folder, told apart by its content."""
    if has_npy(folder):
        return read_npy(folder)
    if has_peft(folder):
        return pack_rows(read_peft(folder))
    raise AdapterInvalidError(
        f"folder {folder.name} holds neither model.lora_weights.npy nor a PEFT adapter_config.json"
    )
