"""SharedMatrices: A and B used by many rows, within one or many adapters. Each content is in memory once."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np
from blake3 import blake3

_lock = threading.Lock()
_known: WeakValueDictionary[str, SharedMatrices] = WeakValueDictionary()


@dataclass(frozen=True, eq=False)
class SharedMatrices:
    """values: A [rank, in], then B [out, rank], flat; in float32, or as read back from pages. key: digest of
    the float32 values.
    """

    key: str
    rank: int
    in_dim: int
    values: np.ndarray

    @property
    def a(self) -> np.ndarray:
        return self.values[: self.rank * self.in_dim].reshape(self.rank, self.in_dim)

    @property
    def b(self) -> np.ndarray:
        return self.values[self.rank * self.in_dim :].reshape(-1, self.rank)


def share(a: np.ndarray, b: np.ndarray) -> SharedMatrices:
    """The matrices with this content that are already in memory, or new ones. A [rank, in], B [out, rank] in
    float32. Thread-safe."""
    values = np.concatenate((a.ravel(), b.ravel()))
    digest = blake3(repr((a.shape, b.shape)).encode())
    key = digest.update(values.view(np.uint8).data).hexdigest(20)
    return _intern(SharedMatrices(key, a.shape[0], a.shape[1], values))


def restore(key: str, rank: int, in_dim: int, values: np.ndarray) -> SharedMatrices:
    """As `share`, for values that were read back from pages. Thread-safe."""
    return _intern(SharedMatrices(key, rank, in_dim, values))


def find(key: str) -> SharedMatrices | None:
    with _lock:
        return _known.get(key)


def shared_bytes(found: Iterable[SharedMatrices | None]) -> int:
    """Total bytes, counting each once."""
    return sum(one.values.nbytes for one in {id(one): one for one in found if one is not None}.values())


def _intern(made: SharedMatrices) -> SharedMatrices:
    with _lock:
        return _known.setdefault(made.key, made)
