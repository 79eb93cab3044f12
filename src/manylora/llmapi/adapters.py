"""AdapterRegistry: which directory each adapter id means, and its tensors."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

from manylora.errors import AdapterError, AdapterInvalidError, AdapterNotCachedError
from manylora.llmapi.lora import LoRARequest
from manylora.lora.catalog import read_adapter_folder
from manylora.request import LoraInput

__all__ = ["AdapterRegistry", "read_adapter"]


@dataclass
class _Entry:
    folder: Path
    num_open: int = 0  # requests under way
    accepted: bool = False  # the engine took it, or may have


class AdapterRegistry:
    """Any thread. An id belongs to one directory. Only an id whose adapter was refused may be given another
    one, so that a mistyped path can be mended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[int, _Entry] = {}

    def claim(self, request: LoRARequest) -> Path:
        """The directory of the request's adapter; to be released when the request ends.

        Raises AdapterInvalidError when the id means another directory, AdapterNotCachedError when the request
        has no path and the id is not known.
        """
        task_id = request.lora_int_id
        if request.lora_ckpt_source != "hf":
            raise AdapterInvalidError(
                f"lora_ckpt_source '{request.lora_ckpt_source}' is not supported: convert the adapter to a "
                "PEFT directory"
            )
        folder = None if request.lora_path is None else Path(request.lora_path).resolve()
        with self._lock:
            entry = self._entries.get(task_id)
            if folder is None and entry is None:
                raise AdapterNotCachedError(task_id)
            if entry is None:
                assert folder is not None
                entry = self._entries[task_id] = _Entry(folder)
            elif folder not in (None, entry.folder):
                if entry.accepted or entry.num_open:
                    raise AdapterInvalidError(
                        f"lora_int_id {task_id} of {request.lora_name!r} belongs to an adapter of another "
                        "path: give each adapter an id of its own"
                    )
                entry.folder = folder
            entry.num_open += 1
            return entry.folder

    def release(self, task_id: int, accepted: bool) -> None:
        """A request has ended. accepted: not because of its adapter, so the id keeps its directory."""
        with self._lock:
            entry = self._entries[task_id]
            entry.num_open -= 1
            entry.accepted = entry.accepted or accepted


def read_adapter(task_id: int, folder: Path) -> LoraInput:
    """An adapter's tensors, from disk. Raises AdapterInvalidError."""
    try:
        return LoraInput(task_id, *read_adapter_folder(folder))
    except AdapterError as error:
        raise AdapterInvalidError(f"Failed to load LoRA adapter: {error}") from error
