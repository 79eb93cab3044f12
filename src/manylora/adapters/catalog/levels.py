"""Copies of adapters: in memory, if they could not be read again; in a folder, if nothing else has them."""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from manylora.adapters.catalog.files import is_passing
from manylora.adapters.formats.tensor_files import NUMPY_TYPES, RawTensor, read_safetensors, write_safetensors
from manylora.adapters.tensors import Adapter, AdapterRow, FileAdapter, adapter_from_rows, share
from manylora.errors import AdapterInvalidError
from manylora.kernels.row_format import Encoding, RowFormat
from manylora.request import LoraExtra
from manylora.system.folders import CopyFolder
from manylora.system.threads import lower_priority

logger = logging.getLogger("manylora")

MAX_PENDING = 4  # adapters waiting to be written
PENDING_S = 2.0  # how long the next one waits, which also delays other loads
OURS = r"[0-9a-f]{40}\.safetensors"  # files that may be deleted in the folder


class MemoryLevel:
    """Adapters by digest. Over the limit the least recently used is dropped. Those that no file holds any
    more (`orphans`) are dropped only when nothing else is left.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._adapters: OrderedDict[str, Adapter | FileAdapter] = OrderedDict()
        self.num_bytes = 0

    def __contains__(self, digest: str) -> bool:
        return digest in self._adapters

    def get(self, digest: str) -> Adapter | FileAdapter | None:
        if digest in self._adapters:
            self._adapters.move_to_end(digest)
        return self._adapters.get(digest)

    def put(self, adapter: Adapter | FileAdapter, orphans: Collection[str] = ()) -> None:
        self.drop(adapter.digest)
        self._adapters[adapter.digest] = adapter
        self.num_bytes += adapter.nbytes
        while self.num_bytes > self._max_bytes and self._adapters:
            oldest = next(iter(self._adapters))
            self.drop(next((one for one in self._adapters if one not in orphans), oldest))

    def drop(self, digest: str) -> None:
        gone = self._adapters.pop(digest, None)
        if gone is not None:
            self.num_bytes -= gone.nbytes


class DiskLevel:
    """Adapters by digest, as files of a `CopyFolder`, whose content is checked against the digest.

    folder: None creates a temporary one, which `close` removes. max_bytes: 0 stores nothing. Thread-safe. A
    full or broken disk only loses copies: no method raises an error because of it.
    """

    def __init__(self, max_bytes: int, folder: Path | None = None) -> None:
        self._files = CopyFolder(max_bytes, folder, OURS, "lora disk level")
        self._writer = ThreadPoolExecutor(1, "manylora-copies", lower_priority)
        self._pending = threading.BoundedSemaphore(MAX_PENDING)

    def put_soon(self, adapter: Adapter) -> None:
        """Write it on a low-priority thread unless it exists. Waits a little if many are pending; with an
        even slower disk no copy is written.
        """
        if self._files.is_writable and not self.has(adapter.digest):
            if not self._pending.acquire(timeout=PENDING_S):
                self._files.fail("the disk is too slow")
                return

            def write() -> None:
                try:
                    self.put(adapter)
                except Exception:
                    logger.exception("a copy of an adapter could not be written")
                finally:
                    self._pending.release()

            try:
                self._writer.submit(write)
            except RuntimeError:  # closed
                self._pending.release()

    def put(self, adapter: Adapter) -> None:
        """Write it unless it exists."""
        self._files.put(_name(adapter.digest), adapter.nbytes, lambda path: self._write(adapter, path))

    def get(self, digest: str) -> Adapter | None:
        path = self._files.path(_name(digest))
        if path is None or not self.has(digest):
            return None
        try:
            found = _read(path)
            if found.digest != digest:
                raise AdapterInvalidError("it is of other content than its name says")
        except Exception as error:  # the file may contain anything
            logger.warning("lora disk level: a copy cannot be read: %s", error or type(error).__name__)
            passing = isinstance(error, MemoryError) or is_passing(error) or is_passing(error.__cause__)
            if not passing:
                self._files.remove(path.name)
            return None
        return found

    def has(self, digest: str) -> bool:
        """Whether there is a copy. It then counts as just used."""
        return self._files.has(_name(digest))

    def close(self) -> None:
        """Write pending copies and end the thread. Idempotent."""
        self._writer.shutdown(wait=True)
        self._files.close()

    def _write(self, adapter: Adapter, path: Path) -> None:
        """Raises OSError."""
        shared = {row.shared.key: row.shared for row in adapter.rows if row.shared is not None}
        rows = []
        for row in adapter.rows:
            form, keys = row.format, [row.shared.key] if row.shared else []
            place = row.module_id, row.layer
            rows.append((*place, form.rank, form.dora, form.encoding, form.scale, *keys))
        about = {
            "rows": rows,
            "shared": {one.key: (one.rank, one.in_dim) for one in shared.values()},
            "extras": [(e.name, e.values.shape, e.token_ids) for e in adapter.extras],
        }
        text = json.dumps(about).encode()
        tensors = {"about": RawTensor("U8", (len(text),), text)}
        tensors |= {f"row.{i}": _raw(row.payload) for i, row in enumerate(adapter.rows)}
        tensors |= {f"shared.{key}": _raw(one.values) for key, one in shared.items()}
        tensors |= {f"extra.{i}": _raw(extra.values) for i, extra in enumerate(adapter.extras)}
        write_safetensors(path, tensors)


def _name(digest: str) -> str:
    return f"{digest}.safetensors"


def _read(path: Path) -> Adapter:
    """Raises AdapterInvalidError, ValueError, LookupError, TypeError."""
    tensors = read_safetensors(path)
    about = json.loads(bytes(tensors["about"].data))
    shared = {}
    for key, (rank, in_dim) in about.get("shared", {}).items():
        a, b = np.split(_values(tensors[f"shared.{key}"]), [rank * in_dim])
        shared[key] = share(a.reshape(rank, in_dim), b.reshape(-1, rank))
        if shared[key].key != key:
            raise AdapterInvalidError("its matrices are of other content than they should be")
    rows = []
    for i, (module_id, layer, rank, dora, encoding, scale, *keys) in enumerate(about["rows"]):
        form = RowFormat(rank, dora, Encoding(encoding), scale, shared=bool(keys))
        matrices = shared[keys[0]] if keys else None
        rows.append(AdapterRow(module_id, layer, form, _values(tensors[f"row.{i}"]), shared=matrices))
    extras = [
        LoraExtra(name, _values(tensors[f"extra.{i}"]).reshape(shape), tuple(token_ids))
        for i, (name, shape, token_ids) in enumerate(about["extras"])
    ]
    return adapter_from_rows(rows, extras=extras, finite=True)


def _raw(values: np.ndarray) -> RawTensor:
    kind = next(name for name, dtype in NUMPY_TYPES.items() if dtype == values.dtype)
    flat = np.ascontiguousarray(values).reshape(-1)
    return RawTensor(kind, (flat.size,), flat.view(np.uint8).data)


def _values(tensor: RawTensor) -> np.ndarray:
    return np.asarray(tensor.data).view(NUMPY_TYPES[tensor.dtype])
