"""Named tensors of one file: safetensors, or a checkpoint of torch.save. Only numbers are ever read.

A torch checkpoint is a pickle in a zip. Before torch sees it, its pickle may name nothing but tensors and
their storage, and its zip may not be compressed, so that a file takes no more memory than its own size.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import pickletools
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from manylora.errors import AdapterInvalidError
from manylora.kernels.loading import all_finite, widen
from manylora.lora.bounds import ANY_MODEL, Bounds
from manylora.lora.formats import one_line
from manylora.lora.formats.safe_files import OpenFile
from manylora.lora.number_types import BY_SAFETENSORS, TYPES_READ, narrow_to_bfloat16

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


@dataclass(frozen=True)
class HeaderEntry:
    """start: of its bytes in the file, size: how many these are."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


def header_of(file: OpenFile, bounds: Bounds) -> bytes:
    """Read once, so that whoever comes later has what was judged. Raises ValueError, AdapterInvalidError."""
    if not file.header:
        length = int.from_bytes(file.read(0, 8), "little")
        if length > bounds.header_bytes:
            raise ValueError(
                f"its header has {length} bytes, that of an adapter at most {bounds.header_bytes}"
            )
        file.header = file.read(8, length)
    return file.header


def read_header(file: OpenFile, bounds: Bounds) -> dict[str, HeaderEntry]:
    """By key. The tensors lie side by side and fill the file. Raises ValueError, AdapterInvalidError."""
    header = header_of(file, bounds)
    first = 8 + len(header)
    found: dict[str, HeaderEntry] = {}
    for key, entry in _members(header.decode()):
        if key in found:
            raise ValueError(f"its header names {key[:MAX_KEY]} twice")
        if key == METADATA:
            continue
        if len(found) == bounds.tensors:
            raise ValueError(f"it holds more than {bounds.tensors} tensors, as no adapter does")
        if len(key) > MAX_KEY:
            raise ValueError(f"the name of a tensor in it is longer than {MAX_KEY} characters")
        found[key] = _entry(entry, first)
    at = first
    for one in sorted(found.values(), key=lambda one: (one.start, one.size)):
        if one.start != at:
            raise ValueError("its tensors do not lie side by side")
        at += one.size
    if at != file.size:
        raise ValueError(f"it has {file.size} bytes, by its header {at}")
    return found


def read_metadata(file: OpenFile, bounds: Bounds) -> dict[str, str]:
    """What the header says beside the tensors. Raises ValueError, AdapterInvalidError."""
    members = _members(header_of(file, bounds).decode())
    found: Any = next((value for key, value in members if key == METADATA), {})
    return found if isinstance(found, dict) else {}


def _entry(entry: Any, first: int) -> HeaderEntry:
    dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    numbers = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in (*shape, start, end))
    if not numbers or len(shape) > MAX_DIMS or start > end:
        raise ValueError("a tensor in it has no usable shape or place")
    if dtype not in BITS:
        raise ValueError(f"a tensor in it is of type {str(dtype)[:40]}, which is not known")
    if math.prod(shape) * BITS[dtype] != (end - start) * 8:
        raise ValueError("a tensor's place in it is not of the tensor's size")
    return HeaderEntry(dtype, tuple(shape), first + start, end - start)


def _members(text: str) -> Iterator[tuple[str, Any]]:
    """Keys and values of a JSON object, parsed some at a time: no other thread runs while the JSON module is
    at work, and a header may have megabytes. Raises ValueError."""
    at, start = 0, ""
    while (cut := BETWEEN.search(text, at + SLICE)) is not None:
        yield from _parse(f"{start}{text[at : cut.start() + 1]}}}")
        at, start = cut.end() - 1, "{"
    yield from _parse(start + text[at:])


def _parse(text: str) -> Iterable[tuple[str, Any]]:
    found = json.loads(text, object_pairs_hook=_unique)
    if not isinstance(found, dict):
        raise ValueError("its header is not a JSON object")
    return found.items()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("its header says something twice")
    return found


NUMPY_TYPES = {"F64": np.dtype("<f8"), **{name: one.dtype for name, one in BY_SAFETENSORS.items()}}
TORCH_NAMES = {"F64": "float64", **{name: one.name for name, one in BY_SAFETENSORS.items()}}
# All that the pickle of a state dict needs.
ALLOWED_GLOBALS = re.compile(
    r"torch \w+Storage|torch\._utils _rebuild_(tensor_v2|parameter)|collections OrderedDict"
)
NEWER_TENSOR = "torch._utils _rebuild_tensor_v3"  # by which types without a storage class of their own go
BY_NAME = ("STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4", "NEWOBJ_EX", "OBJ")  # other ways to a class
MAX_OPCODES = 500_000  # about 16 000 tensors; reading them takes half a second
MAX_ENTRIES = 50_000
PIECE = 2**22  # bytes that are copied at a time
OPCODES = 64  # of a tensor's pickle; there are about 30


@dataclass(frozen=True)
class _Span:
    """Bytes of a file that are read when they are wanted."""

    file: OpenFile
    start: int
    size: int

    def read_into(self, target: Any) -> None:
        """target: a writable buffer of `size` bytes. Raises AdapterInvalidError."""
        self.file.read_into(self.start, target)


@dataclass(frozen=True)
class RawTensor:
    """dtype: as safetensors names it (F32, BF16, …). source: the values, row-major, little-endian; bytes or a
    part of a file."""

    dtype: str
    shape: tuple[int, ...]
    source: Any

    @property
    def data(self) -> Any:
        """The values as a bytes-like object; a new one at each call where they are in a file."""
        if not isinstance(self.source, _Span):
            return self.source
        read = np.empty(self.source.size, np.uint8)
        self.source.read_into(read)
        return read

    @property
    def offset(self) -> int | None:
        """Where the values begin in their file; None: they are in memory."""
        return self.source.start if isinstance(self.source, _Span) else None

    @property
    def file(self) -> OpenFile | None:
        """Where the values are; None: in memory."""
        return self.source.file if isinstance(self.source, _Span) else None

    @property
    def num_bytes(self) -> int:
        return self.source.size if isinstance(self.source, _Span) else memoryview(self.source).nbytes

    def part(self, start: int, size: int) -> Any:
        """Some bytes of the values, as `data`. Raises AdapterInvalidError."""
        if not isinstance(self.source, _Span):
            return memoryview(self.source).cast("B")[start : start + size]
        read = bytearray(min(size, self.source.size - start))
        self.source.file.read_into(self.source.start + start, read)
        return read

    def fill(self, key: str, target: np.ndarray, scale: float = 1.0) -> None:
        """Values times scale as float32 into a contiguous target of as many, without memory of their size
        beside it. Raises AdapterInvalidError as `decode`, for what the scale makes of them too."""
        target = target.reshape(-1)
        stored = target
        if self.dtype == "F32" and isinstance(self.source, _Span):
            self.source.read_into(target)
        elif self.dtype == "BF16" and isinstance(self.source, _Span):
            stored = target.view(np.uint16)[target.size :]  # the rear half, which is widened last
            self.source.read_into(stored)
        else:
            target[...] = decode(key, self).reshape(-1)
        if not widen(target, stored, np.float32(scale)):
            raise AdapterInvalidError(f"{key} holds a NaN or an infinity")


def read_safetensors(path: Path, bounds: Bounds = ANY_MODEL) -> dict[str, RawTensor]:
    """Tensors that are read from the file when their data is asked for. Raises AdapterInvalidError."""
    try:
        file = OpenFile(path, bounds)
        return {key: _tensor(file, one) for key, one in read_header(file, bounds).items()}
    except AdapterInvalidError:
        raise
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise AdapterInvalidError(f"{path.name} is not readable: {one_line(error)}") from error


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
    """Copy a safetensors file, with this beside its other metadata. Raises AdapterInvalidError, OSError."""
    try:
        file = OpenFile(path, bounds)
        length = int.from_bytes(file.read(0, 8), "little")
        tensors, metadata = read_header(file, bounds), read_metadata(file, bounds)
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise AdapterInvalidError(f"it is not readable: {one_line(error)}") from error
    first = 8 + length
    header: dict[str, Any] = {METADATA: {key: value} | {k: v for k, v in metadata.items() if k != key}}
    for name, one in tensors.items():
        offsets = [one.start - first, one.start - first + one.size]
        header[name] = {"dtype": one.dtype, "shape": list(one.shape), "data_offsets": offsets}
    with target.open("xb") as made:
        made.write(_header_bytes(header))
        for at in range(first, file.size, PIECE):
            made.write(file.read(at, min(PIECE, file.size - at)))


def _header_bytes(header: Mapping[str, Any]) -> bytes:
    """A safetensors header with its length, padded so that the data starts aligned."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_torch(path: Path, tensors: Mapping[str, RawTensor]) -> None:
    """A state dict by torch.save. Raises OSError."""
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    state = {}
    for key, tensor in tensors.items():
        kind = getattr(torch, TORCH_NAMES[tensor.dtype])
        state[key] = torch.frombuffer(bytearray(tensor.data), dtype=kind).reshape(tensor.shape)
    with path.open("wb") as file:
        torch.save(state, file)


def read_torch(source: bytes | Path, name: str, bounds: Bounds = ANY_MODEL) -> dict[str, RawTensor]:
    """The tensors of a state dict that torch.save wrote. name: of the file, for errors. source: its bytes, or
    its path, and then it is mapped.

    Raises AdapterInvalidError; nothing that the pickle names is run.
    """
    try:
        import torch

        with io.BytesIO(source) if isinstance(source, bytes) else source.open("rb") as file:
            size = file.seek(0, io.SEEK_END)
            _check_archive(file, size, bounds)
            file.seek(0)
            mapped = isinstance(source, Path)
            found = torch.load(
                str(source) if mapped else file, map_location="cpu", weights_only=True, mmap=mapped
            )
        if not isinstance(found, dict):
            raise ValueError("it holds something else than named tensors")
        # Megatron writes None for the extra state that a layer does not have.
        tensors = {str(key): value for key, value in found.items() if value is not None}
        if not all(isinstance(value, torch.Tensor) for value in tensors.values()):
            raise ValueError("it holds something else than named tensors")
        # Two tensors may share a storage, and one may repeat it: neither may grow what is read.
        if sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) > size:
            raise ValueError("its tensors are larger than the file")
        return {key: _raw(tensor) for key, tensor in tensors.items()}
    except Exception as error:  # zipfile, pickletools and torch raise whatever the bytes make them raise
        # torch's own text is advice to load the file without this protection.
        refused = isinstance(error, pickle.UnpicklingError)
        why = "its pickle is not that of named tensors" if refused else one_line(error)
        raise AdapterInvalidError(f"{name} is not a readable torch checkpoint: {why}") from error


def check_type(key: str, tensor: RawTensor) -> np.dtype:
    """Its type in NumPy. Raises AdapterInvalidError for one that is not read."""
    kind = NUMPY_TYPES.get(tensor.dtype)
    if kind is None:
        raise AdapterInvalidError(f"{key} must be {TYPES_READ}, got {tensor.dtype}")
    return kind


def decode(key: str, tensor: RawTensor) -> np.ndarray:
    """Any floating type to float32, in the tensor's shape. Raises AdapterInvalidError, for NaN too."""
    kind = check_type(key, tensor)
    values = np.frombuffer(tensor.data, kind)
    with np.errstate(over="ignore"):
        known = BY_SAFETENSORS.get(tensor.dtype)
        values = known.widen(values) if known and known.widen else values.astype(np.float32)
    check_finite(key, values)
    return values.reshape(tensor.shape)


def read_encoded(key: str, tensor: RawTensor) -> np.ndarray:
    """The bytes of numbers of an encoding, uint8 in the tensor's shape. Raises AdapterInvalidError for a
    NaN."""
    values, has_nan = np.frombuffer(tensor.data, np.uint8), BY_SAFETENSORS[tensor.dtype].has_nan
    if has_nan is not None and has_nan(values):
        raise AdapterInvalidError(f"{key} holds a NaN")
    return values.reshape(tensor.shape)


def check_finite(key: str, values: np.ndarray) -> None:
    """values: float32, any shape. Raises AdapterInvalidError."""
    if not all_finite(values):
        raise AdapterInvalidError(f"{key} holds a NaN or an infinity")


def encode(key: str, values: np.ndarray, dtype: str) -> RawTensor:
    """float32 values to a tensor of `dtype`, which has no encoding. Raises AdapterInvalidError when one is
    beyond its range."""
    with np.errstate(over="ignore"):
        stored = narrow_to_bfloat16(values) if dtype == "BF16" else values.astype(NUMPY_TYPES[dtype])
    tensor = RawTensor(dtype, values.shape, stored.tobytes())
    decode(key, tensor)
    return tensor


def common_dtype(tensors: Sequence[RawTensor]) -> str:
    """float16, bfloat16 or float8_e4m3fn when every tensor is; else float32."""
    kinds = {tensor.dtype for tensor in tensors}
    kind = BY_SAFETENSORS.get(kinds.pop()) if len(kinds) == 1 else None
    return kind.name if kind is not None else "float32"


def _tensor(file: OpenFile, entry: HeaderEntry) -> RawTensor:
    return RawTensor(entry.dtype, entry.shape, _Span(file, entry.start, entry.size))


def _check_archive(file: IO[bytes], size: int, bounds: Bounds) -> None:
    if not zipfile.is_zipfile(file):
        raise ValueError("it is not the zip archive that torch.save writes")
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        most = min(MAX_ENTRIES, 2 * bounds.tensors)
        if len(entries) > most:
            raise ValueError(f"it has more than {most} entries")
        if any(e.compress_type != zipfile.ZIP_STORED for e in entries):
            raise ValueError("its entries are compressed")
        if sum(entry.file_size for entry in entries) > size:
            raise ValueError("its entries are larger than the file")
        pickles = [entry for entry in entries if entry.filename.rpartition("/")[2] == "data.pkl"]
        if len(pickles) != 1:
            raise ValueError("it must hold data.pkl once")
        _check_pickle(archive.read(pickles[0]), min(MAX_OPCODES, OPCODES * bounds.tensors))


def _check_pickle(data: bytes, most: int) -> None:
    for number, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        if number == most:
            raise ValueError("its pickle is longer than an adapter's can be")
        if argument == NEWER_TENSOR:
            raise ValueError("it holds 8-bit floats or another type that is read from safetensors only")
        named = opcode.name == "GLOBAL" and not ALLOWED_GLOBALS.fullmatch(str(argument))
        if named or opcode.name in BY_NAME:
            what = str(argument or opcode.name).replace(" ", ".")[:80]
            raise ValueError(f"it names {what}, which is not a tensor; code in a checkpoint is never run")


def _raw(tensor: Any) -> RawTensor:
    import torch

    name = str(tensor.dtype).removeprefix("torch.")
    kinds = {TORCH_NAMES[kind]: kind for kind in ("F64", "F32", "F16", "BF16")}
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or name not in kinds:
        return RawTensor(name, tuple(tensor.shape), b"")
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return RawTensor(kinds[name], tuple(tensor.shape), data)
