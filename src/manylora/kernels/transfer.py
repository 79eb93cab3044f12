"""Copies batch tables from host to device.

A table is a frozen dataclass of tensors, plain values and such dataclasses. All tensors of a step are sent to
a GPU in one copy from pinned memory: with pageable memory the host would wait for running kernels, and a copy
for each tensor costs more than its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")
ALIGN_BYTES = 16  # of each tensor within the buffer of a copy


def upload(values: Sequence[Any] | np.ndarray, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A new tensor on the device. The copy is queued; the host does not wait."""
    made = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return made.to(device, non_blocking=True)


def to_device(table: T, device: torch.device) -> T:
    """The table with every tensor on the device; those from the host are views of one buffer there. The copy
    is queued; the host does not wait."""
    away = [value for value in _tensors(table) if _is_away(value, device)]
    if not away:
        return table
    buffer = _pack(away, pinned=device.type == "cuda").to(device, non_blocking=True)
    moved = iter(_views(buffer, away))
    return _map_tensors(table, lambda value: next(moved) if _is_away(value, device) else value.to(device))


def copy_into(target: Any, source: Any) -> None:
    """Copy the source's tensors to the target's, of equal shapes. Tensors that both share are skipped.

    One copy suffices where `to_device` made the target of an equally shaped table.
    """
    pairs = [
        (old, new)
        for old, new in zip(_tensors(target), _tensors(source), strict=True)
        if new.numel() != old.numel() or (new.numel() and old.data_ptr() != new.data_ptr())
    ]
    for old, new in pairs:
        if old.shape != new.shape:
            raise ValueError(f"a table was recorded with shape {tuple(old.shape)}, got {tuple(new.shape)}")
    away = [(old, new) for old, new in pairs if _is_away(new, old.device)]
    buffer = _buffer([old for old, _ in away])
    if buffer is not None:
        buffer.copy_(_pack([new for _, new in away], pinned=buffer.device.type == "cuda"), non_blocking=True)
        pairs = [(old, new) for old, new in pairs if not _is_away(new, old.device)]
    for old, new in pairs:
        old.copy_(new, non_blocking=True)


def _is_away(value: Tensor, device: torch.device) -> bool:
    """Whether a tensor is not on the device."""
    return value.device.type != device.type and value.numel() > 0


def _tensors(table: Any) -> Iterator[Tensor]:
    for field in fields(table):
        value = getattr(table, field.name)
        if isinstance(value, Tensor):
            yield value
        elif is_dataclass(value):
            yield from _tensors(value)


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
    buffer = torch.empty(_ends(tensors)[-1], dtype=torch.uint8, pin_memory=pinned)
    for view, tensor in zip(_views(buffer, tensors), tensors, strict=True):
        view.copy_(tensor)
    return buffer


def _views(buffer: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of a buffer with the dtypes and shapes of these tensors, one after the other."""
    starts = [0, *_ends(tensors)[:-1]]
    return [
        buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(starts, tensors, strict=True)
    ]


def _buffer(tensors: Sequence[Tensor]) -> Tensor | None:
    """The buffer that consists of exactly these tensors in this order; None: there is none."""
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
