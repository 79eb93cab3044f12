"""Batch tables between host and device: frozen dataclasses whose fields are tensors, plain values or such."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["copy_into", "to_device"]

T = TypeVar("T")


def to_device(table: T, device: torch.device) -> T:
    """The same table with every tensor on the device. Copies from the host are queued, not waited for."""
    changed: dict[str, Any] = {}
    for name, value in _parts(table):
        moved = to_device(value, device) if is_dataclass(value) else value.to(device, non_blocking=True)
        if moved is not value:
            changed[name] = moved
    return replace(table, **changed) if changed else table  # type: ignore[type-var]


def copy_into(target: Any, source: Any) -> None:
    """Fill the target's tensors with the source's, of equal shapes. A tensor both share is left alone."""
    for (name, old), (_, new) in zip(_parts(target), _parts(source), strict=True):
        if is_dataclass(old):
            copy_into(old, new)
        elif old.data_ptr() != new.data_ptr():
            if old.shape != new.shape:
                raise ValueError(f"{name} was recorded with shape {tuple(old.shape)}, got {tuple(new.shape)}")
            old.copy_(new, non_blocking=True)


def _parts(table: Any) -> list[tuple[str, Any]]:
    values = ((field.name, getattr(table, field.name)) for field in fields(table))
    return [(name, value) for name, value in values if isinstance(value, Tensor) or is_dataclass(value)]
