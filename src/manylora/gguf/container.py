"""Reads a GGUF file's header: its metadata, and the locations of its tensors.

The file is untrusted: every count, length and offset is checked against the file's size before anything is
read or allocated.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from manylora.errors import ConfigError, printable

MAGIC, VERSIONS = b"GGUF", (2, 3)
NUMBERS = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
CODES = {
    "u1": "B", "i1": "b", "<u2": "H", "<i2": "h", "<u4": "I", "<i4": "i", "<f4": "f", "<u8": "Q", "<i8": "q",
    "<f8": "d", "?": "?",
}  # fmt: skip
FORMATS = {kind: struct.Struct("<" + code) for kind, code in CODES.items()}
STRING, ARRAY = 8, 9
MOST_KEYS, MOST_TENSORS, MOST_DIMS = 2**16, 2**17, 4
LONGEST_KEY, LONGEST_NAME, LONGEST_TEXT = 2**16 - 1, 256, 2**24  # bytes
LARGEST_HEADER = 2**28  # bytes
MOST_TEXTS = 2**22  # in one array: more than in any vocabulary with its merges
LARGEST_ALIGNMENT = 2**16

READ = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0",
    "MXFP4", "NVFP4",
)  # fmt: skip
"""Names of the types that are read. The others occur only while llama.cpp computes, or are for integers."""


@lru_cache(maxsize=1)
def types() -> dict[int, tuple[str, int, int]]:
    """Type number -> name, values per block, bytes per block: of all types that gguf-py knows."""
    from gguf.constants import GGML_QUANT_SIZES  # its import takes a while, and few processes read a file

    return {int(kind): (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}


@lru_cache(maxsize=1)
def block_sizes() -> dict[str, tuple[int, int]]:
    """Name of a type -> values per block, bytes per block."""
    return {name: sizes for name, *sizes in types().values()}  # type: ignore[misc]


@dataclass(frozen=True)
class TensorInfo:
    """shape: as in PyTorch, outputs first. kind: a name in READ. offset: bytes from the file's start. part:
    for a file in several parts, the index of its part.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    offset: int
    part: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of one run of the last dimension."""
        values, size = block_sizes()[self.kind]
        return self.shape[-1] // values * size

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True)
class Header:
    """metadata: numbers, texts, lists of texts, and numpy arrays of numbers, by key."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_header(path: Path) -> Header:
    """Raises ConfigError that says what is wrong with the file."""
    try:
        with path.open("rb") as file:
            return _Reader(path, file).header()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{path} is not a readable GGUF file: {error}") from error


class _Reader:
    """Raises ValueError."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._size = path.stat().st_size
        self._left = min(self._size, LARGEST_HEADER)

    def header(self) -> Header:
        if self._size < 24 or self._take(4, "its magic") != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self._number("<u4")
        if version not in VERSIONS:
            other = " (its bytes are in big-endian order)" if version in (2 << 24, 3 << 24) else ""
            raise ValueError(f"its version is {version}{other}; read are {' and '.join(map(str, VERSIONS))}")
        tensors, keys = self._count(MOST_TENSORS, "tensors"), self._count(MOST_KEYS, "metadata keys")
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self._text(LONGEST_KEY, "a metadata key")
            if key in metadata:
                raise ValueError(f"metadata key {printable(key)} is there twice")
            metadata[key] = self._value(self._number("<u4"), key)
        found = [self._tensor() for _ in range(tensors)]
        return Header(self._path, metadata, self._placed(found, metadata))

    def _placed(self, found: list[TensorInfo], metadata: dict[str, Any]) -> dict[str, TensorInfo]:
        """The tensors with offsets from the file's start. Raises ValueError for an offset outside of the
        file.
        """
        align = metadata.get("general.alignment", 32)
        if not isinstance(align, int) or not 1 <= align <= LARGEST_ALIGNMENT or align & (align - 1):
            raise ValueError(
                f"general.alignment must be a power of 2 up to {LARGEST_ALIGNMENT}, got {align!r}"
            )
        start = -(-self._file.tell() // align) * align
        placed: dict[str, TensorInfo] = {}
        for one in found:
            moved = TensorInfo(one.name, one.shape, one.kind, start + one.offset)
            if one.offset % align or moved.offset + moved.nbytes > self._size:
                raise ValueError(
                    f"tensor {printable(one.name)} ({one.nbytes} bytes at {moved.offset}) does not lie in "
                    f"the file of {self._size} bytes: copy or download it again, whole"
                )
            if one.name in placed:
                raise ValueError(f"tensor {printable(one.name)} is there twice")
            placed[one.name] = moved
        return placed

    def _tensor(self) -> TensorInfo:
        name = self._text(LONGEST_NAME, "a tensor's name")
        dims = self._number("<u4")
        if not 1 <= dims <= MOST_DIMS:
            raise ValueError(f"tensor {printable(name)} has {dims} dimensions, at most {MOST_DIMS} are read")
        shape = tuple(reversed([self._number("<u8") for _ in range(dims)]))
        kind = self._number("<u4")
        named, values, _ = types().get(kind, (f"type {kind}", 1, 1))
        if named not in READ:
            raise ValueError(
                f"tensor {printable(name)} is stored as {named}, which is not read; read are "
                f"{', '.join(READ)}"
            )
        if not all(1 <= size <= self._size * 8 for size in shape) or shape[-1] % values:
            raise ValueError(
                f"tensor {printable(name)} has the shape {list(shape)}, which {named} cannot have"
            )
        return TensorInfo(name, shape, named, self._number("<u8"))

    def _value(self, kind: int, key: str) -> Any:
        if kind in NUMBERS:
            return self._number(NUMBERS[kind])
        if kind == STRING:
            return self._text(LONGEST_TEXT, key)
        if kind != ARRAY:
            raise ValueError(f"metadata key {printable(key)} has type {kind}, which there is not")
        inner, count = self._number("<u4"), self._number("<u8")
        if inner == STRING:
            if count > min(self._left // 8, MOST_TEXTS):
                raise ValueError(f"metadata key {printable(key)} says it has {count} texts")
            return [self._text(LONGEST_TEXT, key) for _ in range(count)]
        if inner not in NUMBERS:
            raise ValueError(f"metadata key {printable(key)} is an array of type {inner}, which is not read")
        kind_of = np.dtype(NUMBERS[inner])
        return np.frombuffer(self._take(count * kind_of.itemsize, key), dtype=kind_of)

    def _text(self, most: int, what: str) -> str:
        length = self._number("<u8")
        if length > most:
            raise ValueError(f"{printable(what)} says it has {length} bytes")
        return self._take(length, what).decode("utf-8", errors="replace")

    def _count(self, most: int, what: str) -> int:
        count = self._number("<u8")
        if count > most:
            raise ValueError(f"it says it has {count} {what}; at most {most} are read")
        return count

    def _number(self, kind: str) -> Any:
        form = FORMATS[kind]
        return form.unpack(self._take(form.size, "a number"))[0]

    def _take(self, count: int, what: str) -> bytes:
        if count > self._left:
            raise ValueError(f"it ends, or its header is too large, before the end of {printable(what)}")
        self._left -= count
        data = self._file.read(count)
        if len(data) != count:
            raise ValueError("it was cut short while it was read")
        return data
