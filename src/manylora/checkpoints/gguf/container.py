"""Reads a GGUF file's header: its metadata, and the locations of its tensors. A model may be in several
files, NAME-00001-of-00003.gguf and so on: the first has the metadata, each has some of the tensors.

The file is untrusted: each count, length and offset is checked before anything is read or allocated.
"""

from __future__ import annotations

import math
import os
import re
import struct
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from manylora.errors import ConfigError, printable

MAGIC, VERSIONS = b"GGUF", (2, 3)
# By the numbers of their types in a file, as `struct` names them.
NUMBERS = {
    kind: struct.Struct(f"<{code}") for kind, code in zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True)
}
U32, U64 = NUMBERS[4], NUMBERS[10]
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
    """shape: outputs first. kind: a name in READ. offset: from the start of part number `part`."""

    name: str
    shape: tuple[int, ...]
    kind: str
    offset: int
    part: int = 0

    @property
    def row_bytes(self) -> int:
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
            return read_open(file, path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def read_open(
    file: BinaryIO, path: Path, most_bytes: int = LARGEST_HEADER, most_tensors: int = MOST_TENSORS
) -> Header:
    """The header of a file that is open at its start. path: for errors. Raises ConfigError, OSError."""
    try:
        return _Reader(path, file, most_bytes, most_tensors).header()
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{path} is not a readable GGUF file: {error}") from error


class _Reader:
    """Raises ValueError."""

    def __init__(self, path: Path, file: BinaryIO, most_bytes: int, most_tensors: int) -> None:
        self._path, self._file, self._most_tensors = path, file, most_tensors
        self._size = os.fstat(file.fileno()).st_size
        self._left = min(self._size, most_bytes)

    def header(self) -> Header:
        if self._size < 24 or self._take(4, "its magic") != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self._number(U32)
        if version not in VERSIONS:
            other = " (its bytes are in big-endian order)" if version in (2 << 24, 3 << 24) else ""
            raise ValueError(f"its version is {version}{other}; read are {' and '.join(map(str, VERSIONS))}")
        tensors, keys = self._count(self._most_tensors, "tensors"), self._count(MOST_KEYS, "metadata keys")
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self._text(LONGEST_KEY, "a metadata key")
            if key in metadata:
                raise ValueError(f"metadata key {printable(key)} is there twice")
            metadata[key] = self._value(self._number(U32), key)
        found = [self._tensor() for _ in range(tensors)]
        align = metadata.get("general.alignment", 32)
        if not isinstance(align, int) or not 1 <= align <= LARGEST_ALIGNMENT or align & (align - 1):
            raise ValueError(
                f"general.alignment must be a power of 2 up to {LARGEST_ALIGNMENT}, got {align!r}"
            )
        start = -(-self._file.tell() // align) * align
        placed: dict[str, TensorInfo] = {}
        for one in found:
            moved = replace(one, offset=start + one.offset)
            if one.offset % align or moved.offset + moved.nbytes > self._size:
                raise ValueError(
                    f"tensor {printable(one.name)} ({one.nbytes} bytes at {moved.offset}) does not lie in "
                    f"the file of {self._size} bytes: copy or download it again, whole"
                )
            if one.name in placed:
                raise ValueError(f"tensor {printable(one.name)} is there twice")
            placed[one.name] = moved
        return Header(self._path, metadata, placed)

    def _tensor(self) -> TensorInfo:
        name = self._text(LONGEST_NAME, "a tensor's name")
        dims = self._number(U32)
        if not 1 <= dims <= MOST_DIMS:
            raise ValueError(f"tensor {printable(name)} has {dims} dimensions, at most {MOST_DIMS} are read")
        shape = tuple(reversed([self._number(U64) for _ in range(dims)]))
        kind = self._number(U32)
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
        return TensorInfo(name, shape, named, self._number(U64))

    def _value(self, kind: int, key: str) -> Any:
        if kind in NUMBERS:
            return self._number(NUMBERS[kind])
        if kind == STRING:
            return self._text(LONGEST_TEXT, key)
        if kind != ARRAY:
            raise ValueError(f"metadata key {printable(key)} has type {kind}, which there is not")
        inner, count = self._number(U32), self._number(U64)
        if inner == STRING:
            if count > min(self._left // 8, MOST_TEXTS):
                raise ValueError(f"metadata key {printable(key)} says it has {count} texts")
            return [self._text(LONGEST_TEXT, key) for _ in range(count)]
        if inner not in NUMBERS:
            raise ValueError(f"metadata key {printable(key)} is an array of type {inner}, which is not read")
        number = NUMBERS[inner]
        return np.frombuffer(self._take(count * number.size, key), dtype=number.format)

    def _text(self, most: int, what: str) -> str:
        length = self._number(U64)
        if length > most:
            raise ValueError(f"{printable(what)} says it has {length} bytes")
        return self._take(length, what).decode("utf-8", errors="replace")

    def _count(self, most: int, what: str) -> int:
        count = self._number(U64)
        if count > most:
            raise ValueError(f"it says it has {count} {what}; at most {most} are read")
        return count

    def _number(self, number: struct.Struct) -> Any:
        return number.unpack(self._take(number.size, "a number"))[0]

    def _take(self, count: int, what: str) -> bytes:
        if count > self._left:
            raise ValueError(f"it ends, or its header is too large, before the end of {printable(what)}")
        self._left -= count
        data = self._file.read(count)
        if len(data) != count:
            raise ValueError("it was cut short while it was read")
        return data


NAMED = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})", re.DOTALL)
MOST_PARTS = 1000
NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"


def part_paths(path: Path) -> list[Path]:
    """All parts of a file, in order; `path` is any. Raises ConfigError that names the first missing."""
    named = NAMED.fullmatch(path.stem)
    if named is None:
        return [path]
    number, count = int(named["number"]), int(named["count"])
    if not 1 <= number <= count <= MOST_PARTS:
        raise ConfigError(
            f"{path}: its name says that it is part {number} of {count}; read are 1 to {MOST_PARTS} parts"
        )
    parts = [path.with_name(part_name(named["stem"], one, count, path.suffix)) for one in range(1, count + 1)]
    missing = [part for part in parts if not part.is_file()]
    if missing:
        raise ConfigError(
            f"{missing[0]} is missing ({len(missing)} of the {count} parts of this GGUF file are): put all "
            "of them in one folder"
        )
    return parts


def part_name(stem: str, number: int, count: int, suffix: str = ".gguf") -> str:
    return f"{stem}-{number:05}-of-{count:05}{suffix}"


def read_parts(path: Path) -> Header:
    """The header of a file of which `path` is any part: the first part's metadata, and all tensors. Each part
    is checked against its own size first. Raises ConfigError.
    """
    paths = part_paths(path)
    headers = [read_header(one) for one in paths]
    tensors: dict[str, TensorInfo] = {}
    for number, header in enumerate(headers):
        said = header.metadata.get(NUMBER, 0), header.metadata.get(COUNT, 0) or 1
        if said != (number, len(paths)):
            raise ConfigError(
                f"{header.path}: its {NUMBER} and {COUNT} are {printable(str(said[0]))} and "
                f"{printable(str(said[1]))}, and by its name they are {number} and {len(paths)}: parts are "
                f"called NAME-{1:05}-of-{2:05}.gguf and so on, as llama-gguf-split makes them"
            )
        twice = sorted(tensors.keys() & header.tensors.keys())
        if twice:
            raise ConfigError(f"{header.path}: tensor {printable(twice[0])} is in another part too")
        tensors |= {name: replace(info, part=number) for name, info in header.tensors.items()}
    wanted = headers[0].metadata.get(TENSORS, len(tensors))
    if wanted != len(tensors):
        raise ConfigError(
            f"{paths[0]} says that all parts together have {printable(str(wanted))} tensors, and they have "
            f"{len(tensors)}: they are not of one file"
        )
    return replace(headers[0], tensors=tensors)


@dataclass(frozen=True)
class Metadata:
    """kind: `general.architecture`, with which the names of the keys begin."""

    header: Header
    kind: str

    def get(self, name: str, default: Any = None) -> Any:
        """A number, a text, or a list."""
        found = self.header.metadata.get(f"{self.kind}.{name}", default)
        return found.tolist() if hasattr(found, "tolist") else found

    def number(self, name: str, default: float | None = None) -> Any:
        """Raises ConfigError unless it is one number, or the same number for every layer that has it."""
        found = self.get(name, default)
        if isinstance(found, list):
            values = set(found) - {0} or set(found)
            found = values.pop() if len(values) == 1 else "different ones for its layers"
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise self._error(name, f"must be a number, got {printable(str(found))}")
        return found

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1. Raises ConfigError."""
        found = self.number(name, default)
        if not isinstance(found, int) or found < 1:
            raise self._error(name, f"must be a whole number of at least 1, got {found}")
        return found

    def per_layer(self, name: str) -> list[Any]:
        found = self.get(name)
        found = found if isinstance(found, list) else [found] * self.layers
        if len(found) < self.layers:
            raise self._error(name, f"has {len(found)} entries for {self.layers} layers")
        return found[: self.layers]

    def _error(self, name: str, what: str) -> ConfigError:
        return ConfigError(f"{self.header.path}: metadata {self.kind}.{name} {what}")

    def has(self, tensor: str) -> bool:
        return tensor in self.header.tensors

    def in_any(self, name: str) -> bool:
        return any(self.has(f"blk.{layer}.{name}") for layer in range(self.layers))

    def rows(self, name: str) -> int:
        info = self.header.tensors.get(name)
        return 0 if info is None else info.shape[0]

    @property
    def layers(self) -> int:
        """Layers for predicting several tokens, which are the last ones, are not counted."""
        count = self.count("block_count") - self.number("nextn_predict_layers", 0)
        if not 1 <= count <= len(self.header.tensors):
            raise self._error("block_count", f"is {self.number('block_count')}, which its tensors are not")
        return count

    @property
    def heads(self) -> int:
        return self.count("attention.head_count")

    @property
    def head_dim(self) -> int:
        return self.count("attention.key_length", self.count("embedding_length") // self.heads)

    @property
    def inner_size(self) -> int:
        """Of the MLP of a layer: some converters write another number than the tensors have."""
        names = (f"blk.{layer}.ffn_down.weight" for layer in range(self.layers))
        found = next((self.header.tensors[name] for name in names if self.has(name)), None)
        return found.shape[-1] if found is not None else self.number("feed_forward_length", 0)

    @property
    def rotated_share(self) -> float:
        return self.count("rope.dimension_count", self.head_dim) / self.head_dim
