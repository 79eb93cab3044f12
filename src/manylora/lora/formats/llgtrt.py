"""llgtrt's one-file form: a safetensors file with the two tensors `weights` and `config`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from manylora.errors import AdapterInvalidError
from manylora.kernels.row_format import Encoding
from manylora.lora.bounds import ANY_MODEL, Bounds
from manylora.lora.formats.safe_files import OpenFile
from manylora.lora.formats.tensor_files import RawTensor, read_safetensors, write_safetensors
from manylora.lora.number_types import BY_DTYPE, BY_SAFETENSORS, TYPES_READ

NAMES = {"weights", "config"}
MAX_HEADER = 2**16  # of a file with two tensors


def is_llgtrt(path: Path, bounds: Bounds = ANY_MODEL) -> bool:
    """Whether the header names exactly these two tensors."""
    try:
        file = OpenFile(path, bounds)
        size = int.from_bytes(file.read(0, 8), "little")
        header = json.loads(file.read(8, size)) if 0 < size <= MAX_HEADER else None
    except (AdapterInvalidError, OSError, ValueError, RecursionError):
        return False
    return isinstance(header, dict) and header.keys() - {"__metadata__"} == NAMES


def read_llgtrt(path: Path, bounds: Bounds = ANY_MODEL) -> tuple[np.ndarray, np.ndarray]:
    """Weights [1, rows, W] in the type of the file, and config [1, rows, 3 or 4] int32. Raises
    AdapterInvalidError."""
    tensors = read_safetensors(path, bounds)
    if tensors.keys() != NAMES:
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
