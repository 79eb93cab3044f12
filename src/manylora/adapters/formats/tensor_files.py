"""Named tensors of a safetensors file, and conversions of their numbers. Only numbers are ever read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from manylora.adapters.bounds import ANY_MODEL, Bounds
from manylora.adapters.formats import one_line
from manylora.adapters.formats.safe_files import OpenFile
from manylora.adapters.number_types import BY_SAFETENSORS, TYPES_READ, narrow_to_bfloat16
from manylora.errors import AdapterInvalidError
from manylora.kernels.loading import all_finite, widen

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip
MAX_KEY = 512  # characters; patterns are searched in keys
MAX_DIMS = 8
METADATA = "__metadata__"
SLICE = 2**16  # characters
BETWEEN = re.compile(r'\}\s*,\s*"')  # two entries; a name with this in it is not read


NUMPY_TYPES = {"F64": np.dtype("<f8"), **{name: one.dtype for name, one in BY_SAFETENSORS.items()}}
TORCH_NAMES = {"F64": "float64", **{name: one.name for name, one in BY_SAFETENSORS.items()}}
PIECE = 2**22  # bytes that are copied at a time


@dataclass(frozen=True)
class RawTensor:
    """dtype: safetensors' name (F32, BF16, …). held: the values, row-major and little-endian, as bytes; None:
    they are the `size` bytes at `offset` of `file`, and are read when they are asked for."""

    dtype: str
    shape: tuple[int, ...]
    held: Any
    file: OpenFile | None = None
    offset: int = 0
    size: int = 0

    @classmethod
    def of(cls, values: np.ndarray) -> RawTensor:
        """In float32."""
        values = np.ascontiguousarray(values, np.float32)
        return cls("F32", values.shape, values)

    @property
    def data(self) -> Any:
        """The values as a bytes-like object. If they are in a file, each call reads them."""
        if self.file is None:
            return self.held
        read = np.empty(self.size, np.uint8)
        self.file.read_into(self.offset, read)
        return read

    def part(self, start: int, size: int) -> Any:
        """A part of the values' bytes, like `data`. Raises AdapterInvalidError."""
        if self.file is None:
            return memoryview(self.held).cast("B")[start : start + size]
        read = bytearray(min(size, self.size - start))
        self.file.read_into(self.offset + start, read)
        return read

    def pieces(self) -> list[RawTensor]:
        """Each of the first dimension by itself. Nothing is read."""
        count, shape = self.shape[0], self.shape[1:]
        size = self.nbytes // count
        if self.file is not None:
            starts = range(self.offset, self.offset + count * size, size or 1)
            return [replace(self, shape=shape, offset=start, size=size) for start in starts]
        held = memoryview(self.held).cast("B")
        return [replace(self, shape=shape, held=held[n * size : (n + 1) * size]) for n in range(count)]

    @property
    def nbytes(self) -> int:
        return self.size if self.file is not None else memoryview(self.held).nbytes

    def turned(self, key: str) -> RawTensor:
        """With the last two dimensions swapped, in memory. Raises AdapterInvalidError."""
        bits = np.frombuffer(self.data, f"u{check_type(key, self).itemsize}").reshape(self.shape)
        bits = np.ascontiguousarray(bits.swapaxes(-1, -2))
        return RawTensor(self.dtype, bits.shape, bits)

    def fill(self, key: str, target: np.ndarray, scale: float = 1.0) -> None:
        """Write the values times scale as float32 into a contiguous target of the same size, without another
        buffer of that size. Raises AdapterInvalidError as `decode` does, also if the scaled values are not
        finite."""
        target = target.reshape(-1)
        stored = target
        if self.file is not None and self.dtype in ("F32", "BF16"):
            if self.dtype == "BF16":
                stored = target.view(np.uint16)[target.size :]  # the rear half, which is widened last
            self.file.read_into(self.offset, stored)
        else:
            target[...] = decode(key, self).reshape(-1)
        if not widen(target, stored, np.float32(scale)):
            raise AdapterInvalidError(f"{key} holds a NaN or an infinity")


def header_of(file: OpenFile, bounds: Bounds) -> bytes:
    """The header, which is read from the file only once. Raises ValueError, AdapterInvalidError."""
    if not file.header:
        length = int.from_bytes(file.read(0, 8), "little")
        if length > bounds.header_bytes:
            raise ValueError(
                f"its header has {length} bytes, that of an adapter at most {bounds.header_bytes}"
            )
        file.header = file.read(8, length)
    return file.header


def read_header(file: OpenFile, bounds: Bounds) -> dict[str, RawTensor]:
    """The tensors of a file. They must be adjacent and fill it. Raises ValueError, TypeError, LookupError,
    RecursionError, AdapterInvalidError."""
    header = header_of(file, bounds)
    at = first = 8 + len(header)
    found: dict[str, RawTensor] = {}
    for key, entry in _members(header.decode()):
        if key in found:
            raise ValueError(f"its header names {key[:MAX_KEY]} twice")
        if key == METADATA:
            continue
        if len(found) == bounds.tensors:
            raise ValueError(f"it holds more than {bounds.tensors} tensors, as no adapter does")
        if len(key) > MAX_KEY:
            raise ValueError(f"the name of a tensor in it is longer than {MAX_KEY} characters")
        dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in (*shape, start, end))
        if not numbers or len(shape) > MAX_DIMS or start > end:
            raise ValueError("a tensor in it has no usable shape or place")
        if dtype not in BITS:
            raise ValueError(f"a tensor in it is of type {str(dtype)[:40]}, which is not known")
        if math.prod(shape) * BITS[dtype] != (end - start) * 8:
            raise ValueError("a tensor's place in it is not of the tensor's size")
        found[key] = RawTensor(dtype, tuple(shape), None, file, first + start, end - start)
    for start, size in sorted((one.offset, one.size) for one in found.values()):
        if start != at:
            raise ValueError("its tensors do not lie side by side")
        at += size
    if at != file.size:
        raise ValueError(f"it has {file.size} bytes, by its header {at}")
    return found


def read_metadata(file: OpenFile, bounds: Bounds) -> dict[str, str]:
    """The header's metadata. Raises ValueError, AdapterInvalidError."""
    members = _members(header_of(file, bounds).decode())
    found: Any = next((value for key, value in members if key == METADATA), {})
    return found if isinstance(found, dict) else {}


def _members(text: str) -> Iterator[tuple[str, Any]]:
    """Keys and values of a JSON object. It is parsed in slices: the JSON module holds the GIL, and a header
    may have megabytes. Raises ValueError."""
    at, start = 0, ""
    while (cut := BETWEEN.search(text, at + SLICE)) is not None:
        yield from _parse(f"{start}{text[at : cut.start() + 1]}}}")
        at, start = cut.end() - 1, "{"
    yield from _parse(start + text[at:])


def _parse(text: str) -> Iterable[tuple[str, Any]]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("its header says something twice")
        return found

    found = json.loads(text, object_pairs_hook=unique)
    if not isinstance(found, dict):
        raise ValueError("its header is not a JSON object")
    return found.items()


def read_safetensors(path: Path, bounds: Bounds = ANY_MODEL) -> dict[str, RawTensor]:
    """Like `tensors_of`, for the file at this path."""
    try:
        file = OpenFile(path, bounds)
    except OSError as error:
        raise AdapterInvalidError(f"{path.name} is not readable: {one_line(error)}") from error
    return tensors_of(file, bounds)


def tensors_of(file: OpenFile, bounds: Bounds) -> dict[str, RawTensor]:
    """The tensors of a file. Their values are read when they are asked for. Raises AdapterInvalidError."""
    try:
        return read_header(file, bounds)
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise AdapterInvalidError(f"{file.name} is not readable: {one_line(error)}") from error


def write_safetensors(path: Path, tensors: Mapping[str, RawTensor]) -> None:
    """Raises OSError."""
    header: dict[str, Any] = {METADATA: {"format": "pt"}}
    end = 0
    for key, tensor in tensors.items():
        start, end = end, end + memoryview(tensor.data).nbytes
        header[key] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(_header_bytes(header))
        for tensor in tensors.values():
            file.write(tensor.data)


def with_metadata(path: Path, target: Path, key: str, value: str, bounds: Bounds = ANY_MODEL) -> None:
    """Copy a safetensors file and set one entry of its metadata. Raises AdapterInvalidError, OSError."""
    try:
        file = OpenFile(path, bounds)
        length = int.from_bytes(file.read(0, 8), "little")
        tensors, metadata = read_header(file, bounds), read_metadata(file, bounds)
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise AdapterInvalidError(f"it is not readable: {one_line(error)}") from error
    first = 8 + length
    header: dict[str, Any] = {METADATA: {key: value} | {k: v for k, v in metadata.items() if k != key}}
    for name, one in tensors.items():
        offsets = [one.offset - first, one.offset - first + one.size]
        header[name] = {"dtype": one.dtype, "shape": list(one.shape), "data_offsets": offsets}
    with target.open("xb") as made:
        made.write(_header_bytes(header))
        for at in range(first, file.size, PIECE):
            made.write(file.read(at, min(PIECE, file.size - at)))


def _header_bytes(header: Mapping[str, Any]) -> bytes:
    """A safetensors header with its length, padded so that the data is aligned."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def check_type(key: str, tensor: RawTensor) -> np.dtype:
    """The NumPy type. Raises AdapterInvalidError for an unsupported type."""
    kind = NUMPY_TYPES.get(tensor.dtype)
    if kind is None:
        raise AdapterInvalidError(f"{key} must be {TYPES_READ}, got {tensor.dtype}")
    return kind


def decode(key: str, tensor: RawTensor) -> np.ndarray:
    """Convert any supported type to float32, in the tensor's shape. Raises AdapterInvalidError, also for NaN
    and infinity."""
    kind = check_type(key, tensor)
    values = np.frombuffer(tensor.data, kind)
    with np.errstate(over="ignore"):
        known = BY_SAFETENSORS.get(tensor.dtype)
        values = known.widen(values) if known and known.widen else values.astype(np.float32)
    if not all_finite(values):
        raise AdapterInvalidError(f"{key} holds a NaN or an infinity")
    return values.reshape(tensor.shape)


def read_encoded(key: str, tensor: RawTensor) -> np.ndarray:
    """The bytes of an encoded type: uint8, in the tensor's shape. Raises AdapterInvalidError for a NaN."""
    values, has_nan = np.frombuffer(tensor.data, np.uint8), BY_SAFETENSORS[tensor.dtype].has_nan
    if has_nan is not None and has_nan(values):
        raise AdapterInvalidError(f"{key} holds a NaN")
    return values.reshape(tensor.shape)


def encode(key: str, values: np.ndarray, dtype: str) -> RawTensor:
    """Convert float32 values to `dtype`, which must not be an encoded type. Raises AdapterInvalidError for
    values beyond its range."""
    with np.errstate(over="ignore"):
        stored = narrow_to_bfloat16(values) if dtype == "BF16" else values.astype(NUMPY_TYPES[dtype])
    tensor = RawTensor(dtype, values.shape, stored.tobytes())
    decode(key, tensor)
    return tensor
