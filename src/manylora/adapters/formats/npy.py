"""Adapters as the tensors of a request: the pair of .npy files that TensorRT-LLM's converters write, and
llgtrt's safetensors file with the two tensors `weights` and `config`."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from manylora.adapters.bounds import ANY_MODEL, Bounds
from manylora.adapters.extras import check_invocation
from manylora.adapters.formats import one_line
from manylora.adapters.formats.safe_files import OpenFile, is_plain
from manylora.adapters.formats.tensor_files import RawTensor, read_safetensors, write_safetensors
from manylora.adapters.number_types import BY_DTYPE, BY_SAFETENSORS, TYPES_READ
from manylora.errors import AdapterInvalidError
from manylora.kernels.row_format import Encoding
from manylora.request import MAX_INVOCATION

WEIGHTS = "model.lora_weights.npy"
CONFIG = "model.lora_config.npy"
OLD_CONFIG = "model.lora_keys.npy"
INVOCATION = "model.lora_invocation_tokens.npy"  # ours, of activated LoRA
READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
MAX_DIMS = 8
MAX_HEADER = 2**14  # bytes; NumPy itself refuses texts of more than 10 000
LLGTRT = {"weights", "config"}


def read_npy(folder: Path, bounds: Bounds = ANY_MODEL) -> tuple[np.ndarray, np.ndarray]:
    """Weights [1, rows, W] and config [1, rows, 3 or 4]. Raises AdapterInvalidError naming the file."""
    old = is_plain(folder / OLD_CONFIG) and not is_plain(folder / CONFIG)
    stored = [_Array.open(folder / name, bounds) for name in (WEIGHTS, OLD_CONFIG if old else CONFIG)]
    bounds.check_table(*(one.shape for one in stored))
    weights, config = (one.read() for one in stored)
    return weights, config


def read_npy_invocation(folder: Path, bounds: Bounds = ANY_MODEL) -> tuple[int, ...]:
    """The invocation tokens of an activated LoRA; empty for other adapters. Raises AdapterInvalidError."""
    if not is_plain(folder / INVOCATION):
        return ()
    stored = _Array.open(folder / INVOCATION, bounds)
    if len(stored.shape) != 2 or stored.shape[0] != 1 or stored.dtype != np.int32:
        found = f"{stored.dtype} {stored.shape}"
        raise AdapterInvalidError(f"{INVOCATION} must be int32 [1, tokens], got {found}")
    if stored.shape[1] > MAX_INVOCATION:
        raise AdapterInvalidError(f"{INVOCATION} must have at most {MAX_INVOCATION} token ids")
    return check_invocation(stored.read()[0].tolist(), INVOCATION)


def write_npy(
    folder: Path, weights: np.ndarray, config: np.ndarray, invocation: tuple[int, ...] = ()
) -> None:
    """invocation: as `read_npy_invocation` returns it. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / INVOCATION).unlink(missing_ok=True)  # of another adapter
    arrays = {WEIGHTS: weights, CONFIG: config}
    if invocation:
        arrays[INVOCATION] = np.array([invocation], np.int32)
    for name, values in arrays.items():  # an error of np.save would not say why a file could not be written
        whole = io.BytesIO()
        np.save(whole, values, allow_pickle=False)
        (folder / name).write_bytes(whole.getbuffer())


@dataclass(frozen=True)
class _Array:
    """An array whose header was read. A mapped file could change or shrink, so values are read on demand."""

    file: OpenFile
    start: int
    shape: tuple[int, ...]
    dtype: np.dtype
    by_columns: bool

    @classmethod
    def open(cls, path: Path, bounds: Bounds) -> _Array:
        if not is_plain(path):
            raise AdapterInvalidError(f"{path.name} is missing")
        try:
            file = OpenFile(path, bounds)
            head = io.BytesIO(file.read(0, min(MAX_HEADER, file.size)))
            version = np.lib.format.read_magic(head)
            if version not in READERS:
                raise ValueError(f"its format is of version {version[0]}.{version[1]}, known are 1.0 and 2.0")
            shape, by_columns, dtype = READERS[version](head)
            if dtype.hasobject or dtype.names or dtype.shape:
                raise ValueError("it holds objects or records, not numbers")
            if min(shape, default=0) < 0 or len(shape) > MAX_DIMS:
                raise ValueError(f"it has no usable shape: {str(shape)[:80]}")
            size = head.tell() + math.prod(shape) * dtype.itemsize
            if size != file.size:
                raise ValueError(f"it has {file.size} bytes, by its header {str(size)[:40]}")
        except AdapterInvalidError:
            raise
        except Exception as error:  # the header is parsed as Python source: a hostile one may raise anything
            raise AdapterInvalidError(
                f"{path.name} is not a readable .npy array: {one_line(error)}"
            ) from error
        if dtype.kind == "V" and dtype.itemsize == 1:
            raise AdapterInvalidError(
                f"{path.name} holds numbers of one byte, and nothing in it says which: give them as F8_E4M3 "
                "in a safetensors file of llgtrt's form, or as bfloat16 here"
            )
        return cls(file, head.tell(), shape, dtype, by_columns)

    def read(self) -> np.ndarray:
        values = np.empty(self.shape, self.dtype, "F" if self.by_columns else "C")
        if values.size:
            self.file.read_into(self.start, values.reshape(-1, order="A").view(np.uint8))
        return values


def read_llgtrt(path: Path, bounds: Bounds = ANY_MODEL) -> tuple[np.ndarray, np.ndarray]:
    """Weights [1, rows, W] in the type of the file, and config [1, rows, 3 or 4] int32. Raises
    AdapterInvalidError."""
    tensors = read_safetensors(path, bounds)
    if tensors.keys() != LLGTRT:
        raise AdapterInvalidError(f"{path.name} must hold the two tensors weights and config")
    weights, config = tensors["weights"], tensors["config"]
    if config.dtype != "I32" or weights.dtype not in BY_SAFETENSORS:
        raise AdapterInvalidError(
            f"{path.name}: config must be int32 and weights {TYPES_READ}, "
            f"got {config.dtype} and {weights.dtype}"
        )
    if len(weights.shape) != 2 or len(config.shape) != 2:
        raise AdapterInvalidError(f"{path.name}: weights and config must have two dimensions")
    kind = BY_SAFETENSORS[weights.dtype]
    encoded = kind.encoding is not Encoding.PLAIN
    bounds.check_table((1, *weights.shape), (1, *config.shape), float8=encoded)
    rows = np.frombuffer(weights.data, kind.dtype).reshape((1, *weights.shape))
    return rows, np.frombuffer(config.data, "<i4").reshape((1, *config.shape))


def write_llgtrt(path: Path, weights: np.ndarray, config: np.ndarray) -> None:
    """weights [1, rows, W], config [1, rows, 4]. The is_dora column is left out when no row is DoRA, which is
    the form llgtrt knows. Raises OSError."""
    columns = config[0] if config.shape[2] == 4 and config[0, :, 3].any() else config[0, :, :3]
    rows = np.ascontiguousarray(weights[0])
    tensors = {
        "config": RawTensor("I32", columns.shape, columns.astype("<i4").tobytes()),
        "weights": RawTensor(BY_DTYPE[weights.dtype].safetensors, rows.shape, rows.view(np.uint8)),
    }
    write_safetensors(path, tensors)
