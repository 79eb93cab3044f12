"""Memory in huge pages, for data that is read completely in every step.

A page of 2 MiB takes one TLB entry where small pages take 512, and the hardware prefetcher does not stop at
every 4 KiB.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from contextlib import suppress

import torch
from torch import Tensor

PIECE = 2**26  # bytes requested at once; unwritten memory is not resident
ALIGNMENT = 64
HUGE_BYTES = 2**21  # size of one huge page
LEAST = 2**16  # bytes; smaller tensors use normal memory
POPULATE_WRITE = 23  # in Linux since 5.14

_lock = threading.Lock()
_piece: mmap.mmap | None = None
_used = 0


def huge_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros on the CPU, resident once they are written. Small tensors share a piece of memory, which is freed
    with the last of them. Raises MemoryError.
    """
    count = torch.Size(shape).numel()
    size = count * dtype.itemsize
    if size < LEAST:
        return torch.zeros(shape, dtype=dtype)
    piece, offset = _take(size)
    return torch.frombuffer(piece, dtype=dtype, count=count, offset=offset).view(shape)


def make_resident(tensor: Tensor) -> None:
    """Make the system allocate a contiguous CPU tensor's memory now. Otherwise the first write to each page
    waits for that.

    Values are kept. No effect if the system does not support it. Thread-safe, also while other threads write
    to it.
    """
    if sys.platform != "linux":
        return
    first = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = tensor.data_ptr() + tensor.nbytes - first
    with suppress(OSError, AttributeError):
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        advise(first, size, POPULATE_WRITE)


def _take(size: int) -> tuple[mmap.mmap, int]:
    """A piece of memory, and the offset of `size` free bytes in it."""
    global _piece, _used
    if size > PIECE // 4:  # large requests get their own piece
        return _allocate(size), 0
    with _lock:
        if _piece is None or _used + size > len(_piece):
            _piece, _used = _allocate(PIECE), 0
        offset, _used = _used, -(-(_used + size) // ALIGNMENT) * ALIGNMENT
        return _piece, offset


def _allocate(size: int) -> mmap.mmap:
    if sys.platform != "linux":
        return mmap.mmap(-1, size)
    try:  # shared memory, the default, does not get huge pages
        piece = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes cannot be allocated: {error}") from error
    with suppress(OSError):  # a system without huge pages
        piece.madvise(mmap.MADV_HUGEPAGE)
    return piece
