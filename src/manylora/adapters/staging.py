"""Reusable buffers for adapters between file and cache. Reuse matters because the first write to memory that
is new to a process costs as much as the copy itself.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections import deque
from contextlib import suppress

import numpy as np

FLOAT32 = np.dtype(np.float32)
LEAST = 2**22  # bytes; smaller buffers are not worth reusing
HUGE = 2**21  # the system's large pages
# The last returned buffer. No lock: a finaliser may run while its thread already holds one.
_spare: deque[mmap.mmap] = deque(maxlen=1)


def take(elements: int, dtype: np.dtype = FLOAT32) -> np.ndarray:
    """[elements] of a type, not initialised. The memory is returned automatically when no view of it is left.
    Thread-safe.
    """
    size = -(-dtype.itemsize * elements // HUGE) * HUGE
    if size < LEAST:
        return np.empty(elements, dtype)
    memory = _pop()
    if memory is None or len(memory) < size:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        _advise(memory, "MADV_HUGEPAGE")
    owner = (ctypes.c_char * len(memory)).from_buffer(memory)
    weakref.finalize(owner, _give_back, memory).atexit = False
    return np.frombuffer(memoryview(owner), dtype, elements)


def drop() -> None:
    """Return the spare memory to the system."""
    _pop()


def _pop() -> mmap.mmap | None:
    with suppress(IndexError):
        return _spare.pop()
    return None


def _give_back(memory: mmap.mmap) -> None:
    """Allow the system to reclaim its pages if it is short of memory."""
    _advise(memory, "MADV_FREE")
    _spare.append(memory)


def _advise(memory: mmap.mmap, what: str) -> None:
    """Advice that the system does not know is ignored."""
    with suppress(AttributeError, OSError):
        memory.madvise(getattr(mmap, what))
