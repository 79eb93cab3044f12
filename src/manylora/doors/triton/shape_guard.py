"""Protects a model's process from inputs with impossible shapes.

The server compares a tensor's size with its shape modulo 2**64, so `[1, 2**63 - 1, 2**63 - 1]` with four
bytes is accepted. The model's process then creates a NumPy array of that shape, and nothing catches NumPy's
error. `check_shapes` checks before that, and `read_inputs` tells the client.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import subprocess
from collections.abc import Callable, Iterable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from manylora.errors import RequestError
from manylora.system.compiler import Source, load_library

logger = logging.getLogger("manylora")

MOST_ELEMENTS = 2**59  # with 8 bytes each, the number of bytes still fits int64
STAND_IN = (0,) * 16  # shape of the replacement tensor; no input has so many dimensions
NEW_FROM_DESCR = 94  # index of PyArray_NewFromDescr in NumPy's C API table
SOURCE = Source("shape_guard", (Path(__file__).with_suffix(".c"),))
POINTER, INTEGER = ctypes.c_void_p, ctypes.c_int
NewFromDescr = ctypes.PYFUNCTYPE(
    POINTER, POINTER, POINTER, INTEGER, POINTER, POINTER, POINTER, INTEGER, POINTER
)
SHAPES = [ctypes.c_int64 * dims for dims in range(len(STAND_IN) + 1)]
_functions: list[Any] = []  # kept alive: the binding calls them until the process ends


def check_shapes(pb_utils: Any) -> None:
    """Call this in a model's `initialize`, before anything creates a tensor.

    The binding looks up NumPy's functions once, at first use, and finds ours instead of that for arrays.
    """
    entry = POINTER.from_address(_numpy_functions() + NEW_FROM_DESCR * ctypes.sizeof(POINTER))
    numpys_own = entry.value
    checked = _compiled(numpys_own) or _interpreted(numpys_own)
    _functions.append(checked)
    entry.value = ctypes.cast(checked, POINTER).value
    try:
        pb_utils.Tensor("a", np.zeros(1, np.int32))
    finally:
        entry.value = numpys_own


def read_inputs(
    tensors: Iterable[Any], read_other: Callable[[Any], np.ndarray] | None = None
) -> dict[str, np.ndarray]:
    """Tensors by name. read_other: for a dtype NumPy lacks. Raises RequestError for an impossible shape."""
    arrays = {}
    for tensor in tensors:
        try:
            array = tensor.as_numpy()
        except Exception:
            if read_other is None:
                raise
            array = read_other(tensor) if _is_possible(tensor.shape()) else np.empty(STAND_IN)
        if array.ndim == len(STAND_IN):
            raise RequestError(
                f"input {tensor.name()} has the impossible shape {tensor.shape()}: "
                f"a tensor has at most {MOST_ELEMENTS} elements"
            )
        arrays[tensor.name()] = array
    return arrays


def _is_possible(shape: Iterable[int]) -> bool:
    sizes = [size for size in shape if size]
    return prod(sizes) <= MOST_ELEMENTS and min(sizes, default=1) > 0


def _compiled(numpys_own: int | None) -> Any:
    try:
        library = load_library(SOURCE)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("shapes are checked in Python, which takes longer: %s", error)
        return None
    if library is None:
        return None
    library.set_numpys_own(POINTER(numpys_own))
    return library.checked


def _interpreted(numpys_own: int | None) -> Any:
    """The same in Python: some microseconds per tensor."""
    make, nothing = NewFromDescr(numpys_own), SHAPES[-1]()  # type: ignore[arg-type]

    def checked(kind, descr, dims, shape, strides, data, flags, parent):  # type: ignore[no-untyped-def]
        if dims >= len(STAND_IN) or not _is_possible(SHAPES[dims].from_address(shape)):
            dims, shape, strides = len(STAND_IN), ctypes.addressof(nothing), None
        return make(kind, descr, dims, shape, strides, data, flags, parent)

    return NewFromDescr(checked)


def _numpy_functions() -> int:
    version = int(np.__version__.split(".")[0])
    module = importlib.import_module("numpy.core.multiarray" if version < 2 else "numpy._core.multiarray")
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = POINTER, (ctypes.py_object, ctypes.c_char_p)
    return pointer(module._ARRAY_API, None)
