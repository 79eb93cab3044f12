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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from manylora.errors import AdapterInvalidError
from manylora.lora.formats import one_line
from manylora.lora.tensors import BFLOAT16, narrow_to_bfloat16, widen_bfloat16

__all__ = [
    "RawTensor",
    "common_dtype",
    "decode",
    "encode",
    "read_safetensors",
    "read_torch",
    "write_safetensors",
    "write_torch",
]

NUMPY_TYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": BFLOAT16,
}
NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# All that the pickle of a state dict needs.
ALLOWED_GLOBALS = re.compile(
    r"torch \w+Storage|torch\._utils _rebuild_(tensor_v2|parameter)|collections OrderedDict"
)
BY_NAME = ("STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4", "NEWOBJ_EX", "OBJ")  # other ways to a class
MAX_OPCODES = 500_000  # about 16 000 tensors; reading them takes half a second
MAX_ENTRIES = 50_000


@dataclass(frozen=True)
class RawTensor:
    """dtype as safetensors names it (F32, BF16, …); data: the values, row-major, little-endian."""

    dtype: str
    shape: tuple[int, ...]
    data: Any  # a bytes-like object


def read_safetensors(path: Path) -> dict[str, RawTensor]:
    """Raises AdapterInvalidError."""
    try:
        return dict(_slices(memoryview(path.read_bytes())))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise AdapterInvalidError(f"{path.name} is not readable: {one_line(error)}") from error


def write_safetensors(path: Path, tensors: Mapping[str, RawTensor]) -> None:
    """Raises OSError."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, tensor in tensors.items():
        start, end = end, end + memoryview(tensor.data).nbytes
        header[key] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts aligned
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.data)


def write_torch(path: Path, tensors: Mapping[str, RawTensor]) -> None:
    """A state dict by torch.save. Raises OSError."""
    import torch

    kinds = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {
        key: torch.frombuffer(bytearray(tensor.data), dtype=kinds[tensor.dtype]).reshape(tensor.shape)
        for key, tensor in tensors.items()
    }
    with path.open("wb") as file:
        torch.save(state, file)


def read_torch(data: bytes, name: str) -> dict[str, RawTensor]:
    """The tensors of a state dict that torch.save wrote. name: of the file, for errors.

    Raises AdapterInvalidError; nothing that the pickle names is run.
    """
    try:
        _check_archive(data)
        import torch

        found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True, mmap=False)
        if not isinstance(found, dict):
            raise ValueError("it holds something else than named tensors")
        # Megatron writes None for the extra state that a layer does not have.
        tensors = {str(key): value for key, value in found.items() if value is not None}
        if not all(isinstance(value, torch.Tensor) for value in tensors.values()):
            raise ValueError("it holds something else than named tensors")
        # Two tensors may share a storage, and one may repeat it: neither may grow what is read.
        if sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) > len(data):
            raise ValueError("its tensors are larger than the file")
        return {key: _raw(tensor) for key, tensor in tensors.items()}
    except Exception as error:  # zipfile, pickletools and torch raise whatever the bytes make them raise
        # torch's own text is advice to load the file without this protection.
        refused = isinstance(error, pickle.UnpicklingError)
        why = "its pickle is not that of named tensors" if refused else one_line(error)
        raise AdapterInvalidError(f"{name} is not a readable torch checkpoint: {why}") from error


def decode(key: str, tensor: RawTensor) -> np.ndarray:
    """Any floating type to float32, in the tensor's shape. Raises AdapterInvalidError, for NaN too."""
    kind = NUMPY_TYPES.get(tensor.dtype)
    if kind is None:
        raise AdapterInvalidError(f"{key} must be float32, float16 or bfloat16, got {tensor.dtype}")
    values = np.frombuffer(tensor.data, kind)
    with np.errstate(over="ignore"):
        values = widen_bfloat16(values) if tensor.dtype == "BF16" else values.astype(np.float32)
    if not np.isfinite(values).all():
        raise AdapterInvalidError(f"{key} holds a NaN or an infinity")
    return values.reshape(tensor.shape)


def encode(key: str, values: np.ndarray, dtype: str) -> RawTensor:
    """float32 values to a tensor of `dtype`. Raises AdapterInvalidError when one is beyond its range."""
    with np.errstate(over="ignore"):
        stored = narrow_to_bfloat16(values) if dtype == "BF16" else values.astype(NUMPY_TYPES[dtype])
    tensor = RawTensor(dtype, values.shape, stored.tobytes())
    decode(key, tensor)
    return tensor


def common_dtype(tensors: Sequence[RawTensor]) -> str:
    """float16 or bfloat16 when every tensor is; else float32."""
    kinds = {tensor.dtype for tensor in tensors}
    return NAMES.get(kinds.pop(), "float32") if len(kinds) == 1 else "float32"


def _slices(data: memoryview) -> Iterator[tuple[str, RawTensor]]:
    """The tensors of a safetensors file, in place. The library's own reader copies each and lets no other
    thread run meanwhile, so that a large adapter would halt every stream for a tenth of a second."""
    start = 8 + int.from_bytes(data[:8], "little")
    if not 8 < start <= len(data):
        raise ValueError("its header is longer than the file")
    header = json.loads(bytes(data[8:start]))
    header.pop("__metadata__", None)
    values, end = data[start:], 0
    for key, one in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape = one["dtype"], one["shape"]
        first, last = one["data_offsets"]
        if not all(type(n) is int and n >= 0 for n in (*shape, first, last)):
            raise ValueError(f"the shape or the place of {key} is no list of counts")
        size = math.prod(shape) * NUMPY_TYPES[dtype].itemsize if dtype in NUMPY_TYPES else last - first
        if first != end or last - first != size:
            raise ValueError(f"the values of {key} are not where its shape and its neighbours say")
        end = last
        yield key, RawTensor(str(dtype), tuple(shape), values[first:last])
    if end != len(values):
        raise ValueError("its values are not as many as its header says")


def _check_archive(data: bytes) -> None:
    if not zipfile.is_zipfile(io.BytesIO(data)):
        raise ValueError("it is not the zip archive that torch.save writes")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
        if len(entries) > MAX_ENTRIES:
            raise ValueError(f"it has more than {MAX_ENTRIES} entries")
        if any(e.compress_type != zipfile.ZIP_STORED for e in entries):
            raise ValueError("its entries are compressed")
        if sum(entry.file_size for entry in entries) > len(data):
            raise ValueError("its entries are larger than the file")
        pickles = [entry for entry in entries if entry.filename.rpartition("/")[2] == "data.pkl"]
        if len(pickles) != 1:
            raise ValueError("it must hold data.pkl once")
        _check_pickle(archive.read(pickles[0]))


def _check_pickle(data: bytes) -> None:
    for number, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        if number == MAX_OPCODES:
            raise ValueError("its pickle is longer than an adapter's can be")
        named = opcode.name == "GLOBAL" and not ALLOWED_GLOBALS.fullmatch(str(argument))
        if named or opcode.name in BY_NAME:
            what = str(argument or opcode.name).replace(" ", ".")[:80]
            raise ValueError(f"it names {what}, which is not a tensor; code in a checkpoint is never run")


def _raw(tensor: Any) -> RawTensor:
    import torch

    kinds = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.dtype not in kinds:
        return RawTensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), b"")
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return RawTensor(kinds[tensor.dtype], tuple(tensor.shape), data)
