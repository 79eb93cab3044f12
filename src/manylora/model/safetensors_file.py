"""SafetensorsFile: a safetensors file that is read, not mapped.

Its pages do not stay in the process's memory. A file that is truncated while it is read raises an error
instead of killing the process with SIGBUS.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manylora.errors import ConfigError

STORED_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Types of plain weights, and their names in config.json."""


class SafetensorsFile:
    """A context manager. Raises ConfigError unless the file is complete. on_read: gets bytes of reads."""

    def __init__(self, path: Path, on_read: Callable[[int], None] = lambda count: None) -> None:
        from safetensors import safe_open  # benchmarks/gpu.py runs where it is not installed

        self.path, self._on_read = path, on_read
        try:
            with safe_open(path, framework="pt"):
                pass  # the library checks the header: its tensors cover the file without gaps or overlaps
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            length = int.from_bytes(os.pread(self._descriptor, 8, 0), "little")
            self._entries = json.loads(os.pread(self._descriptor, length, 8))
        except Exception as error:  # the library's errors have no common class
            raise ConfigError(f"{path} is not a readable safetensors file: {error}") from error
        self._entries.pop("__metadata__", None)
        self._start = 8 + length

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def keys(self) -> Iterable[str]:
        return self._entries.keys()

    def types(self) -> Iterator[str]:
        """Types of the tensors, in the order of `keys`, by their names in the file."""
        return (entry["dtype"] for entry in self._entries.values())

    def get_slice(self, name: str) -> FileTensor:
        """Does not read anything yet."""
        return FileTensor(self, name, self._entries[name])

    def get_tensor(self, name: str) -> Tensor:
        return self.get_slice(name).whole()

    def read(self, offset: int, out: Tensor) -> None:
        """Fill a contiguous CPU tensor, starting `offset` bytes after the header. Thread-safe."""
        view = memoryview(out.reshape(-1).view(torch.uint8).numpy().data)
        done = 0
        while done < len(view):
            got = os.preadv(self._descriptor, [view[done:]], self._start + offset + done)
            if got == 0:
                raise ConfigError(f"{self.path} is not a readable safetensors file: it was cut short")
            done += got
            self._on_read(got)


class FileTensor:
    def __init__(self, file: SafetensorsFile, name: str, entry: Mapping[str, Any]) -> None:
        self._file, self._name, self._entry = file, name, entry
        self._offset: int = entry["data_offsets"][0]

    def get_shape(self) -> list[int]:
        return self._entry["shape"]

    def get_dtype(self) -> str:
        """The type as safetensors names it: F32, BF16, …"""
        return self._entry["dtype"]

    @property
    def stored_bytes(self) -> int:
        start, stop = self._entry["data_offsets"]
        return stop - start

    @property
    def dtype(self) -> torch.dtype:
        """Raises ConfigError for a type that is not supported."""
        if self.get_dtype() not in STORED_DTYPES:
            raise ConfigError(f"{self._name} is stored as {self.get_dtype()}, which is not read")
        return STORED_DTYPES[self.get_dtype()]

    def whole(self) -> Tensor:
        made = torch.empty(self.get_shape(), dtype=self.dtype)
        self._file.read(self._offset, made)
        return made

    def of_expert(self, number: int) -> Tensor:
        """One of the tensors stacked in this one. Raises ConfigError."""
        count, *shape = self.get_shape()
        if not 0 <= number < count:
            raise ConfigError(f"{self._name} must hold more than {number} experts, got {count}")
        made = torch.empty(shape, dtype=self.dtype)
        self._file.read(self._offset + number * made.nbytes, made)
        return made

    def read_rows(self, start: int, out: Tensor) -> None:
        """Rows [start, start + len(out)), of the last dimension, into a contiguous tensor of this dtype."""
        shape = self.get_shape()
        size = self.dtype.itemsize * (shape[-1] if len(shape) > 1 else 1)
        self._file.read(self._offset + start * size, out)

    def read_block(self, rows: range, columns: range) -> Tensor:
        """Read only these rows and columns of a matrix. Stacked matrices count as one, stacked by rows."""
        made = torch.empty((len(rows), len(columns)), dtype=self.dtype)
        width, size = self.get_shape()[-1], self.dtype.itemsize
        if len(columns) == width:
            self.read_rows(rows.start, made)
            return made
        for row, out in zip(rows, made, strict=True):
            self._file.read(self._offset + (row * width + columns.start) * size, out)
        return made
