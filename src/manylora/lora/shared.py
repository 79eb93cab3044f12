"""SharedMatrices: A and B that many rows have, of one adapter and of many: by content, in memory once."""

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
    """values: A [rank, in], then B [out, rank], flat; in float32, or as they came back from pages. key: of
    what they are in float32."""

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
    """The matrices of this content that are in memory already, or these. A [rank, in], B [out, rank] in
    float32. Any thread."""
    values = np.concatenate((a.ravel(), b.ravel()))
    digest = blake3(repr((a.shape, b.shape)).encode())
    key = digest.update(values.view(np.uint8).data).hexdigest(20)
    return _intern(SharedMatrices(key, a.shape[0], a.shape[1], values))


def restore(key: str, rank: int, in_dim: int, values: np.ndarray) -> SharedMatrices:
    """As `share`, of values that were read back from pages. Any thread."""
    return _intern(SharedMatrices(key, rank, in_dim, values))


def find(key: str) -> SharedMatrices | None:
    with _lock:
        return _known.get(key)


def shared_bytes(found: Iterable[SharedMatrices | None]) -> int:
    """Of all, each once."""
    return sum(one.values.nbytes for one in {id(one): one for one in found if one is not None}.values())


def _intern(made: SharedMatrices) -> SharedMatrices:
    with _lock:
        return _known.setdefault(made.key, made)
