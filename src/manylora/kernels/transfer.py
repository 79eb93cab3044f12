"""Batch tables between host and device: frozen dataclasses whose fields are tensors, plain values or such.

All tables of a step go to a GPU as one copy from pinned memory: pageable memory would make the host wait for
what the device computes, and a copy for each table costs more than its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

__all__ = ["copy_into", "to_device", "upload"]

T = TypeVar("T")
PLACE_BYTES = 16  # where a table begins in a piece of memory is a multiple of it


def upload(values: Sequence[Any] | np.ndarray, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A new tensor on the device. The copy is queued, not waited for."""
    made = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return made.to(device, non_blocking=True)


def to_device(table: T, device: torch.device) -> T:
    """The same table with every tensor on the device; those that come from the host lie there in one piece.
    The copy is queued, not waited for."""
    away = [value for value in _tensors(table) if _is_away(value, device)]
    if not away:
        return table
    piece = _pack(away, pinned=device.type == "cuda").to(device, non_blocking=True)
    moved = iter(_views(piece, away))
    return _map(table, lambda value: next(moved) if _is_away(value, device) else value.to(device))


def copy_into(target: Any, source: Any) -> None:
    """Fill the target's tensors with the source's, of equal shapes. A tensor both share is left alone.

    Of a target that `to_device` made of such a source, with one copy.
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
    piece = _piece([old for old, _ in away])
    if piece is not None:
        piece.copy_(_pack([new for _, new in away], pinned=piece.device.type == "cuda"), non_blocking=True)
        pairs = [(old, new) for old, new in pairs if not _is_away(new, old.device)]
    for old, new in pairs:
        old.copy_(new, non_blocking=True)


def _is_away(value: Tensor, device: torch.device) -> bool:
    """Whether a tensor must be moved to be on the device."""
    return value.device.type != device.type and value.numel() > 0


def _tensors(table: Any) -> Iterator[Tensor]:
    for field in fields(table):
        value = getattr(table, field.name)
        if isinstance(value, Tensor):
            yield value
        elif is_dataclass(value):
            yield from _tensors(value)


def _map(table: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The table with every tensor changed, in the order of `_tensors`."""
    changed: dict[str, Any] = {}
    for field in fields(table):
        value = getattr(table, field.name)
        if isinstance(value, Tensor):
            changed[field.name] = change(value)
        elif is_dataclass(value):
            changed[field.name] = _map(value, change)
    return replace(table, **changed)


def _ends(tensors: Sequence[Tensor]) -> list[int]:
    """Where each ends in a piece, rounded up to where the next begins. Bytes."""
    return list(accumulate(-(-tensor.nbytes // PLACE_BYTES) * PLACE_BYTES for tensor in tensors))


def _pack(tensors: Sequence[Tensor], *, pinned: bool) -> Tensor:
    piece = torch.empty(_ends(tensors)[-1], dtype=torch.uint8, pin_memory=pinned)
    for view, tensor in zip(_views(piece, tensors), tensors, strict=True):
        view.copy_(tensor)
    return piece


def _views(piece: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors like these, one after the other in a piece."""
    starts = [0, *_ends(tensors)[:-1]]
    return [
        piece[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(starts, tensors, strict=True)
    ]


def _piece(tensors: Sequence[Tensor]) -> Tensor | None:
    """The piece of memory whose views these are, all of them and in this order; None: they are not."""
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
