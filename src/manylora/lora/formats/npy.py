"""The pair of .npy files that TensorRT-LLM's converters write."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from manylora.errors import AdapterInvalidError
from manylora.lora.float8 import is_float8
from manylora.lora.formats import one_line

__all__ = ["WEIGHTS", "has_npy", "read_npy", "write_npy"]

WEIGHTS = "model.lora_weights.npy"
CONFIG = "model.lora_config.npy"
OLD_CONFIG = "model.lora_keys.npy"


def has_npy(folder: Path) -> bool:
    return (folder / WEIGHTS).is_file()


def read_npy(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Weights [1, rows, W] and config [1, rows, 3 or 4]. Raises AdapterInvalidError naming the file."""
    config = CONFIG if (folder / CONFIG).is_file() or not (folder / OLD_CONFIG).is_file() else OLD_CONFIG
    return _read(folder / WEIGHTS), _read(folder / config)


def write_npy(folder: Path, weights: np.ndarray, config: np.ndarray) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / WEIGHTS, weights, allow_pickle=False)
    np.save(folder / CONFIG, config, allow_pickle=False)


def _read(path: Path) -> np.ndarray:
    """The array, in memory: a mapped file could change or shrink under the reader."""
    if not path.is_file():
        raise AdapterInvalidError(f"{path.name} is missing")
    try:
        # Mapping takes no memory, and fails when the header promises more than the file holds.
        np.lib.format.open_memmap(path, mode="r")
        with path.open("rb") as file:
            values = np.lib.format.read_array(file, allow_pickle=False)
    except Exception as error:  # the header is parsed as Python source: a hostile one may raise anything
        raise AdapterInvalidError(f"{path.name} is not a readable .npy array: {one_line(error)}") from error
    if is_float8(values.dtype):
        raise AdapterInvalidError(
            f"{path.name} holds numbers of one byte, and nothing in it says which: give them as F8_E4M3 in a "
            "safetensors file of llgtrt's form, or as bfloat16 here"
        )
    return values
