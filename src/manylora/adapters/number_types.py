"""The types of an adapter's numbers in files and in NumPy, and their encodings in pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from manylora.errors import AdapterInvalidError
from manylora.kernels.loading import narrow
from manylora.kernels.row_format import Encoding

BFLOAT16 = np.dtype("V2")
"""How NumPy arrays hold bfloat16: as two opaque bytes with the number's bits."""
FLOAT8 = np.dtype("V1")
"""How NumPy arrays hold 8-bit floats (e4m3, no infinities): as an opaque byte with the number's bits."""
FLOAT8_NAN = 0x7F  # with either sign; the only code that is not a number


def is_bfloat16(dtype: np.dtype) -> bool:
    return dtype.kind == "V" and dtype.itemsize == 2


def widen_bfloat16(values: np.ndarray) -> np.ndarray:
    """Convert bfloat16 bits to float32, exactly; same shape."""
    bits = np.ascontiguousarray(values).view(np.uint16).astype(np.uint32) << 16
    return bits.view(np.float32)


def narrow_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Round float32 to bfloat16 bits, to nearest, ties to even; same shape. Input must not contain NaN."""
    bits = np.empty(values.shape, np.uint16)
    narrow(bits.reshape(-1), np.ascontiguousarray(values, np.float32).reshape(-1))
    return bits.view(BFLOAT16)


_SIZES, _FRACTIONS = np.arange(128) >> 3, np.arange(128) & 7  # exponent and mantissa of each positive byte
_POSITIVE = np.where(_SIZES == 0, _FRACTIONS * 2.0**-9, (8 + _FRACTIONS) * 2.0 ** (_SIZES - 10.0))
_POSITIVE[FLOAT8_NAN] = np.nan
FLOAT8_VALUES = np.concatenate((_POSITIVE, -_POSITIVE)).astype(np.float32)
"""float32 [256]: the value of each byte."""


def widen_float8(values: np.ndarray) -> np.ndarray:
    """Convert bytes of 8-bit floats to float32, exactly; same shape."""
    return FLOAT8_VALUES[np.ascontiguousarray(values).view(np.uint8)]


def has_float8_nan(values: np.ndarray) -> bool:
    """values: bytes of 8-bit floats, any shape."""
    return bool(((np.ascontiguousarray(values).view(np.uint8) & FLOAT8_NAN) == FLOAT8_NAN).any())


@dataclass(frozen=True)
class NumberType:
    """name: torch's. dtype: in NumPy. safetensors: in a file's header. encoding: in pages.

    widen: converts to float32, exactly; None: NumPy does that. has_nan: for encodings, which have no
    infinities and no number beyond the range of any page dtype.
    """

    name: str
    dtype: np.dtype
    safetensors: str
    widen: Callable[[np.ndarray], np.ndarray] | None = None
    encoding: Encoding = Encoding.PLAIN
    has_nan: Callable[[np.ndarray], bool] | None = None


NUMBER_TYPES = (
    NumberType("float32", np.dtype("<f4"), "F32"),
    NumberType("float16", np.dtype("<f2"), "F16"),
    NumberType("bfloat16", BFLOAT16, "BF16", widen_bfloat16),
    NumberType("float8_e4m3fn", FLOAT8, "F8_E4M3", widen_float8, Encoding.FLOAT8, has_float8_nan),
)
TYPES_READ = "float32, float16, bfloat16 or float8 (F8_E4M3)"  # for error messages
BY_NAME = {one.name: one for one in NUMBER_TYPES}
BY_DTYPE = {one.dtype: one for one in NUMBER_TYPES}
BY_SAFETENSORS = {one.safetensors: one for one in NUMBER_TYPES}


def to_bfloat16(where: str, values: np.ndarray) -> np.ndarray:
    """Convert encoded numbers to bfloat16, exactly; same shape. Raises AdapterInvalidError for a NaN."""
    kind = BY_DTYPE[values.dtype]
    assert kind.widen is not None and kind.has_nan is not None
    if kind.has_nan(values):
        raise AdapterInvalidError(f"{where} holds a NaN")
    return narrow_to_bfloat16(kind.widen(values))
