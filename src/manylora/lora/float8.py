"""8-bit floats (e4m3, no infinities) in NumPy, which has no such type: their bytes, and what they mean."""

from __future__ import annotations

import numpy as np

FLOAT8 = np.dtype("V1")
"""How NumPy arrays hold them: a byte without a meaning, the bits of the number."""
FLOAT8_NAME = "float8_e4m3fn"
NAN = 0x7F  # with either sign; the only code that is no number


def _values() -> np.ndarray:
    """float32 [256], of each byte."""
    size = np.arange(128)
    exponent, mantissa = size >> 3, size & 7
    numbers = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    numbers[NAN] = np.nan
    return np.concatenate((numbers, -numbers)).astype(np.float32)


VALUES = _values()


def widen_float8(values: np.ndarray) -> np.ndarray:
    """Bytes of 8-bit floats to float32, exactly; same shape."""
    return VALUES[np.ascontiguousarray(values).view(np.uint8)]


def has_float8_nan(values: np.ndarray) -> bool:
    """values: bytes of 8-bit floats, any shape."""
    return bool(((np.ascontiguousarray(values).view(np.uint8) & NAN) == NAN).any())
