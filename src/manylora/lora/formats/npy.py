"""The pair of .npy files that TensorRT-LLM's converters write. Files are untrusted: nothing is unpickled."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from manylora.errors import AdapterInvalidError

__all__ = ["WEIGHTS", "has_npy", "read_npy", "write_npy"]

WEIGHTS = "model.lora_weights.npy"
CONFIG = "model.lora_config.npy"
OLD_CONFIG = "model.lora_keys.npy"


def has_npy(folder: Path) -> bool:
    return (folder / WEIGHTS).is_file()


def read_npy(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Weights [1, rows, W] and config [1, rows, 3 or 4]. Raises AdapterInvalidError naming the file."""
    config = CONFIG if (folder / CONFIG).is_file() else OLD_CONFIG
    return _read(folder / WEIGHTS), _read(folder / config)


def write_npy(folder: Path, weights: np.ndarray, config: np.ndarray) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / WEIGHTS, weights, allow_pickle=False)
    np.save(folder / CONFIG, config, allow_pickle=False)


def _read(path: Path) -> np.ndarray:
    """Mapped first: a header that promises more than the file holds fails before any memory is taken."""
    try:
        mapped = np.load(path, mmap_mode="r", allow_pickle=False)
        return np.array(mapped)
    except FileNotFoundError as error:
        raise AdapterInvalidError(f"{path.name} is missing") from error
    except (ValueError, OSError, EOFError, OverflowError, TypeError) as error:
        raise AdapterInvalidError(
            f"{path.name} is not a readable .npy array: {str(error).splitlines()[0]}"
        ) from error
