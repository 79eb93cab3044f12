"""Memory for adapters on their way from files to the cache, used again: memory that is new to a process costs
as much as the copy into it."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections import deque
from contextlib import suppress

import numpy as np

__all__ = ["drop", "take"]

FLOAT32 = np.dtype(np.float32)
LEAST = 2**22  # bytes worth keeping
HUGE = 2**21  # the system's large pages
# The latest that nobody uses. No lock: a finaliser may run wherever this thread is, also inside one.
_spare: deque[mmap.mmap] = deque(maxlen=1)


def take(elements: int, dtype: np.dtype = FLOAT32) -> np.ndarray:
    """[elements] of a type, not initialised. Its memory comes back by itself, when no view of it is left. Any
    thread."""
    size = -(-dtype.itemsize * elements // HUGE) * HUGE
    if size < LEAST:
        return np.empty(elements, dtype)
    room = _pop()
    if room is None or len(room) < size:
        room = _map(size)
    held = (ctypes.c_char * len(room)).from_buffer(room)
    weakref.finalize(held, _keep, room).atexit = False
    return np.frombuffer(memoryview(held), dtype, elements)


def drop() -> None:
    """Give what is kept back to the system."""
    _pop()


def _pop() -> mmap.mmap | None:
    with suppress(IndexError):
        return _spare.pop()
    return None


def _keep(room: mmap.mmap) -> None:
    """The system may take its pages from now on, should it be short of memory."""
    if hasattr(mmap, "MADV_FREE"):
        _advise(room, mmap.MADV_FREE)
    _spare.append(room)


def _map(size: int) -> mmap.mmap:
    room = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        _advise(room, mmap.MADV_HUGEPAGE)
    return room


def _advise(room: mmap.mmap, what: int) -> None:
    """Advice that a system does not know is no loss."""
    with suppress(OSError):
        room.madvise(what)
