"""DiskLevel: copies of adapters that were read, for when their own files are changed, broken or gone."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import tempfile
import threading
import time
from collections import OrderedDict
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from manylora.lora.float8 import FLOAT8_NAME
from manylora.openai.serving.reader import ReadAdapter
from manylora.request import LoraExtra

__all__ = ["DiskLevel"]

logger = logging.getLogger("manylora")


RETRY_S = 30.0  # before a disk that failed is written to again


class DiskLevel:
    """By digest, in files of a folder of its own. Over max_bytes the one that was used longest ago goes.

    folder: None makes a temporary one, which goes with `close`. max_bytes 0 keeps nothing. Any thread.
    A full or broken disk costs copies and nothing else: `put` and `get` raise nothing because of it.
    """

    def __init__(self, max_bytes: int, folder: Path | None = None) -> None:
        self._max_bytes, self._folder = max_bytes, folder
        self._temporary = folder is None
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()
        self._failing = False
        self._retry_at = 0.0  # after a failure
        self.num_bytes = 0
        if folder is not None:
            try:
                found = [(one.stat(), one.stem) for one in folder.glob("*.safetensors")]
            except OSError as error:
                found = []
                self._fail(error)
            for at, digest in sorted(found, key=lambda one: one[0].st_mtime):
                self._enter(digest, at.st_size)

    def put(self, adapter: ReadAdapter) -> None:
        """Write it, if it is not there."""
        with self._lock:
            if adapter.num_bytes > self._max_bytes or self._use(adapter.digest):
                return
            if time.monotonic() < self._retry_at:
                return
            try:
                self._make_room(adapter.num_bytes)
                self._enter(adapter.digest, self._write(adapter))
            except (OSError, SafetensorError) as error:  # the format's writer has its own for a full disk
                self._fail(error)
            else:
                if self._failing:
                    logger.warning("lora disk level: copies can be written again")
                self._failing, self._retry_at = False, 0.0

    def get(self, digest: str) -> ReadAdapter | None:
        with self._lock:
            if not self._use(digest):
                return None
            try:
                return self._read(digest)
            except Exception as error:  # whatever somebody made of the file
                logger.warning("lora disk level: a copy cannot be read: %s", type(error).__name__)
                self._drop(digest)
                return None

    def close(self) -> None:
        if self._temporary and self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _fail(self, error: Exception) -> None:
        """Told once until it works again. Nothing is written for a while: half a copy fills a disk too."""
        self._retry_at = time.monotonic() + RETRY_S
        if not self._failing:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            logger.warning("lora disk level: copies cannot be written, serving goes on without: %s", reason)
        self._failing = True

    def _use(self, digest: str) -> bool:
        if digest not in self._sizes:
            return False
        self._sizes.move_to_end(digest)
        return True

    def _enter(self, digest: str, size: int) -> None:
        self._sizes[digest] = size
        self.num_bytes += size

    def _make_room(self, num_bytes: int) -> None:
        while self._sizes and self.num_bytes + num_bytes > self._max_bytes:
            self._drop(next(iter(self._sizes)))

    def _drop(self, digest: str) -> None:
        self.num_bytes -= self._sizes.pop(digest)
        with contextlib.suppress(OSError):
            self._path(digest).unlink()

    def _path(self, digest: str) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="manylora-adapters-"))
        return self._folder / f"{digest}.safetensors"

    def _write(self, adapter: ReadAdapter) -> int:
        """Whole or not at all: another process, or the next start, may read this folder."""
        path = self._path(adapter.digest)
        path.parent.mkdir(parents=True, exist_ok=True)
        facts = {"kind": adapter.kind, "dtype": adapter.dtype, "max_rank": str(adapter.max_rank)}
        facts["extras"] = json.dumps([{"name": e.name, "token_ids": e.token_ids} for e in adapter.extras])
        tensors = {"weights": _bits(adapter.weights), "config": np.ascontiguousarray(adapter.config)}
        part = path.with_suffix(".part")
        if adapter.scales is not None:
            tensors["scales"] = adapter.scales
        try:
            save_file(tensors | {extra.name: _bits(extra.values) for extra in adapter.extras}, part, facts)
            size = part.stat().st_size
            part.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise
        return size

    def _read(self, digest: str) -> ReadAdapter:
        with safe_open(self._path(digest), "numpy") as file:
            facts = file.metadata()
            weights, config = file.get_tensor("weights"), file.get_tensor("config")
            extras = tuple(
                LoraExtra(one["name"], _from_bits(file.get_tensor(one["name"])), tuple(one["token_ids"]))
                for one in json.loads(facts.get("extras", "[]"))
            )
            scales = file.get_tensor("scales") if "scales" in file.keys() else None  # noqa: SIM118 - no mapping
        if facts["dtype"] in ("bfloat16", FLOAT8_NAME):
            weights = weights.view(f"V{weights.itemsize}")
        about = facts["kind"], facts["dtype"], int(facts["max_rank"])
        return ReadAdapter(digest, *about, weights, config, extras, scales=scales)


def _bits(values: np.ndarray) -> np.ndarray:
    """bfloat16 and 8-bit floats go as integers of their bits, which the file format's NumPy side knows."""
    return np.ascontiguousarray(values.view(f"u{values.itemsize}") if values.dtype.kind == "V" else values)


def _from_bits(values: np.ndarray) -> np.ndarray:
    return values.view("V2") if values.dtype == np.uint16 else values
