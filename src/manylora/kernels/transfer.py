"""Memory of the host: tensors in huge pages, and copies of batch tables to the device.

A table is a frozen dataclass of tensors, plain values and such dataclasses. All tensors of a step are copied
to a GPU in one copy from pinned memory. With pageable memory the host would wait for running kernels, and one
copy per tensor would cost more than the bytes.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from ctypes import memmove
from dataclasses import fields, is_dataclass, replace
from functools import cache
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
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


T = TypeVar("T")
ALIGN_BYTES = 16  # alignment of each tensor within the buffer


def upload(values: Sequence[Any] | np.ndarray, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A new tensor on the device. The copy is queued; the host does not wait."""
    made = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return made.to(device, non_blocking=True)


def to_device(table: T, device: torch.device) -> T:
    """The table with every tensor on the device. Tensors from the host become views of one buffer. The copy
    is queued; the host does not wait.
    """
    away = [value for value in _tensors(table) if _is_away(value, device)]
    if not away:
        return table
    buffer = _pack(away, pinned=device.type == "cuda").to(device, non_blocking=True)
    moved = iter(_views(buffer, away))
    return _map_tensors(table, lambda value: next(moved) if _is_away(value, device) else value.to(device))


class TableCopy:
    """Copies tables into the tensors of a table of equal shapes, any number of times. Tensors that both share
    are skipped. Copies are queued; the host does not wait.

    A single copy suffices if `to_device` made the target from a table of equal shapes.
    """

    def __init__(self, target: Any) -> None:
        self._olds = list(_tensors(target))
        self._whole: dict[tuple[int, ...], Tensor | None] = {}  # by the tensors on the host, see `_buffer`

    def __call__(self, source: Any) -> None:
        news = list(_tensors(source))
        if len(news) != len(self._olds):
            raise ValueError(f"a table was recorded with {len(self._olds)} tensors, got {len(news)}")
        moved = [i for i, old in enumerate(self._olds) if self._differs(old, news[i])]
        away = tuple(i for i in moved if _is_away(news[i], self._olds[i].device))
        if away not in self._whole:
            self._whole[away] = _buffer([self._olds[i] for i in away])
        buffer = self._whole[away]
        if buffer is not None:
            packed = _pack([news[i] for i in away], pinned=buffer.device.type == "cuda")
            buffer.copy_(packed, non_blocking=True)
            moved = [i for i in moved if i not in away]
        for i in moved:
            self._olds[i].copy_(news[i], non_blocking=True)

    @staticmethod
    def _differs(old: Tensor, new: Tensor) -> bool:
        """Whether a tensor has different memory. Raises ValueError for a different shape."""
        if old.shape != new.shape:
            raise ValueError(f"a table was recorded with shape {tuple(old.shape)}, got {tuple(new.shape)}")
        return old.data_ptr() != new.data_ptr() and new.numel() > 0


def _is_away(value: Tensor, device: torch.device) -> bool:
    """Whether a tensor is not on the device."""
    return value.device.type != device.type and value.numel() > 0


def _tensors(table: Any) -> Iterator[Tensor]:
    for name in _names(table.__class__):
        value = getattr(table, name)
        if isinstance(value, Tensor):
            yield value
        elif is_dataclass(value):
            yield from _tensors(value)


@cache
def _names(table: type) -> tuple[str, ...]:
    """Names of a dataclass's fields."""
    return tuple(field.name for field in fields(table))


def _map_tensors(table: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The table with every tensor changed, in the order of `_tensors`."""
    changed: dict[str, Any] = {}
    for field in fields(table):
        value = getattr(table, field.name)
        if isinstance(value, Tensor):
            changed[field.name] = change(value)
        elif is_dataclass(value):
            changed[field.name] = _map_tensors(value, change)
    return replace(table, **changed)


def _ends(tensors: Sequence[Tensor]) -> list[int]:
    """The end of each tensor in a shared buffer, in bytes, rounded up to the alignment."""
    return list(accumulate(-(-tensor.nbytes // ALIGN_BYTES) * ALIGN_BYTES for tensor in tensors))


def _pack(tensors: Sequence[Tensor], *, pinned: bool) -> Tensor:
    ends = _ends(tensors)
    buffer = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=pinned)
    address = buffer.data_ptr()
    for start, tensor in zip([0, *ends], tensors, strict=False):
        whole = tensor.contiguous()
        memmove(address + start, whole.data_ptr(), whole.nbytes)  # torch's copy takes several times as long
    return buffer


def _views(buffer: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of a buffer with the dtypes and shapes of these tensors, in order."""
    starts = [0, *_ends(tensors)[:-1]]
    return [
        buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(starts, tensors, strict=True)
    ]


def _buffer(tensors: Sequence[Tensor]) -> Tensor | None:
    """The buffer that consists of exactly these tensors in this order. None if there is none."""
    if not tensors:
        return None
    memory, ends = tensors[0].untyped_storage(), _ends(tensors)
    for start, tensor in zip([0, *ends], tensors, strict=False):
        same = tensor.untyped_storage().data_ptr() == memory.data_ptr()
        if not same or tensor.storage_offset() * tensor.itemsize != start or not tensor.is_contiguous():
            return None
    if memory.nbytes() != ends[-1]:
        return None
    return torch.empty(0, dtype=torch.uint8, device=tensors[0].device).set_(memory, 0, (ends[-1],), (1,))
