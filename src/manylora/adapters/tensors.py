"""Adapter: the canonical, validated form of an adapter's tensors, with a digest of their content.

FileAdapter: the same for values that are still in a file, from where they are read directly into pages.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from weakref import WeakValueDictionary

import numpy as np
from blake3 import blake3

from manylora.adapters.geometry import RowShape
from manylora.adapters.modules import LoraModule, module_name
from manylora.adapters.number_types import BY_DTYPE, is_bfloat16, widen_bfloat16
from manylora.errors import AdapterInvalidError
from manylora.kernels.loading import all_finite
from manylora.kernels.row_format import RowFormat
from manylora.request import CheckedAdapter, LoraExtra, LoraInput

FLOAT16_MAX = 65504.0
CHUNK = 2**22  # elements of an extra that are widened at a time
PARALLEL_BYTES = 2**23  # adapters from this size on are digested by several threads
THREADS = 4


_lock = threading.Lock()
_known: WeakValueDictionary[str, SharedMatrices] = WeakValueDictionary()  # by key


@dataclass(frozen=True, eq=False)
class SharedMatrices:
    """A and B used by many rows; each content is in memory once. values: A [rank, in], then B [out, rank],
    flat, in float32 or as read back from pages. key: digest of the float32 values.
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
    """The matrices of this content, [rank, in] and [out, rank] in float32, each once. Thread-safe."""
    values = np.concatenate((a.ravel(), b.ravel()))
    digest = blake3(repr((a.shape, b.shape)).encode())
    key = digest.update(values.view(np.uint8).data).hexdigest(20)
    return restore(key, a.shape[0], a.shape[1], values)


def restore(key: str, rank: int, in_dim: int, values: np.ndarray) -> SharedMatrices:
    """As `share`, for values that were read back from pages. Thread-safe."""
    with _lock:
        return _known.setdefault(key, SharedMatrices(key, rank, in_dim, values))


def find_shared(key: str) -> SharedMatrices | None:
    with _lock:
        return _known.get(key)


@dataclass(frozen=True, eq=False)
class AdapterRow:
    """One (layer, module). payload [elements]: the format's parts, flat, one after another. For a
    routed-expert module A [experts, rank, in], then B [experts, out, rank].

    content: `digest_values` of the payload, if the reader computed it; the payload may have been narrowed
    since. shared: the matrices of a shared row, whose payload is only its vectors.
    """

    module_id: int
    layer: int
    format: RowFormat
    payload: np.ndarray
    content: bytes = b""
    shared: SharedMatrices | None = None


@dataclass(frozen=True, eq=False)
class Adapter(CheckedAdapter):
    """Immutable. Rows are sorted by layer, then module; extras by name. Equal content has an equal digest,
    whatever its source.
    """

    digest: str
    rows: tuple[AdapterRow, ...]
    extras: tuple[LoraExtra, ...] = ()
    acts: bool = True  # whether it changes any output, as far as that was checked

    @property
    def num_elements(self) -> int:
        return sum(row.payload.size for row in self.rows) + sum(extra.values.size for extra in self.extras)

    @property
    def nbytes(self) -> int:
        own = sum(row.payload.nbytes for row in self.rows) + sum(e.values.nbytes for e in self.extras)
        return own + self.shared_bytes

    @property
    def shared_bytes(self) -> int:
        """Bytes of the matrices that its rows share, each counted once."""
        found = {id(row.shared): row.shared for row in self.rows if row.shared is not None}
        return sum(one.values.nbytes for one in found.values())

    def shapes(self, modules: Mapping[int, LoraModule]) -> list[RowShape]:
        """The shapes of its rows in pages. modules: the model's."""
        keys = ["" if row.shared is None else row.shared.key for row in self.rows]
        return [
            RowShape(modules[row.module_id].at(row.layer), row.layer, row.format, key)
            for row, key in zip(self.rows, keys, strict=True)
        ]


def adapter_from_rows(
    rows: Iterable[AdapterRow],
    half: bool = False,
    extras: Iterable[LoraExtra] = (),
    finite: bool = False,
    digest: str | None = None,
) -> Adapter:
    """Validate the values of rows and extras, and make them canonical. finite: the rows' values are known to
    be finite.
    digest: of the values, if known. Raises AdapterInvalidError.
    """
    rows = sorted(rows, key=lambda row: (row.layer, row.module_id))
    for row, following in pairwise(rows):
        if (row.layer, row.module_id) == (following.layer, following.module_id):
            raise AdapterInvalidError(
                f"lora_config names module {module_name(row.module_id)} of layer {row.layer} more than once"
            )
    checked = set[str]()
    for row in rows:
        if half or not finite:
            where = f"{module_name(row.module_id)} of layer {row.layer}"
            _check_values(where, row.payload, half)
            if row.shared is not None and row.shared.key not in checked:
                checked.add(row.shared.key)
                _check_values(where, row.shared.values, half)
    extras = sorted(extras, key=lambda extra: extra.name)
    for extra in extras:
        for first in range(0, extra.values.size, CHUNK):
            _check_values(extra.name, extra.values.reshape(-1)[first : first + CHUNK], half)
    return Adapter(digest or _digest(rows, extras), tuple(rows), tuple(extras))


def pack_rows(rows: Iterable[AdapterRow]) -> tuple[np.ndarray, np.ndarray]:
    """Convert rows to wire tensors: weights [1, rows, W] padded with zeros, config [1, rows, 4] int32."""
    rows = list(rows)
    assert not any(row.format.shared for row in rows), "a tensor has no place for what rows share"
    width = max((row.payload.size for row in rows), default=0)
    weights = np.zeros((1, len(rows), width), dtype=rows[0].payload.dtype if rows else np.float32)
    for i, row in enumerate(rows):
        weights[0, i, : row.payload.size] = row.payload
    config = [(row.module_id, row.layer, row.format.rank, row.format.dora) for row in rows]
    return weights, np.array(config, np.int32).reshape(1, -1, 4)


def lora_input(task_id: int, rows: Iterable[AdapterRow], extras: Iterable[LoraExtra] = ()) -> LoraInput:
    """Rows and extras in the form that a request in this process carries. All rows have one type."""
    rows = list(rows)
    scales = np.array([row.format.scale for row in rows], np.float32)
    scaled = bool((scales != 1).any())
    return LoraInput(task_id, *pack_rows(rows), extras=tuple(extras), scales=scales if scaled else None)


def check_dims(where: str, a: tuple[int, ...], b: tuple[int, ...], module: LoraModule | None) -> None:
    """Check that A is [rank, in] and B [out, rank], not empty, and of the module's sizes if one is given.
    where: what they belong to, for errors. Raises AdapterInvalidError.
    """
    if len(a) != 2 or len(b) != 2 or a[0] != b[1] or 0 in (*a, *b):
        raise AdapterInvalidError(f"{where}: adapter size of A {a} mismatches adapter size of B {b}")
    if module is not None and (a[1], b[0]) != (module.in_dim, module.out_dim):
        raise AdapterInvalidError(
            f"{where} goes from {a[1]} to {b[0]} dimensions, {module.name} of this model from "
            f"{module.in_dim} to {module.out_dim}: the adapter was made for another model"
        )


def check_layer(where: str, module: LoraModule, layer: int) -> None:
    """Raises AdapterInvalidError for a layer without the module."""
    if not module.is_on(layer):
        raise AdapterInvalidError(f"{where}: layer {layer} of this model has no module {module.name}")


def _check_values(where: str, values: np.ndarray, half: bool) -> None:
    kind = BY_DTYPE.get(values.dtype)
    if kind is not None and kind.has_nan is not None:
        if kind.has_nan(values):
            raise AdapterInvalidError(f"lora_weights holds a NaN in {where}")
        return
    values = widen_bfloat16(values) if is_bfloat16(values.dtype) else values
    if not all_finite(values):
        raise AdapterInvalidError(f"lora_weights holds a NaN or an infinity in {where}")
    if half and values.dtype != np.float16 and (np.abs(values) > FLOAT16_MAX).any():
        raise AdapterInvalidError(f"lora_weights holds a value beyond float16's range in {where}")


def digest_values(values: np.ndarray) -> bytes:
    """BLAKE3 of the type and all bytes, not of the shape; 32 bytes."""
    flat = np.ascontiguousarray(values).reshape(-1)
    return blake3(type_name(values).encode() + b"\0").update(flat.view(np.uint8).data).digest()


def _digest(rows: list[AdapterRow], extras: list[LoraExtra]) -> str:
    """Digest of rows and extras in canonical order: identity, type, and all bytes, without padding."""
    if sum(0 if row.content else row.payload.nbytes for row in rows) < PARALLEL_BYTES:
        contents = [row.content or digest_values(row.payload) for row in rows]
    else:
        with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
            contents = list(pool.map(lambda row: row.content or digest_values(row.payload), rows))
    digest = blake3()
    for row, content in zip(rows, contents, strict=True):
        digest.update(repr((int(row.module_id), row.layer, *row.format.identity())).encode())
        digest.update(content)
        if row.shared is not None:
            digest.update(row.shared.key.encode())
    for extra in extras:
        digest.update(repr((extra.name, extra.values.shape, extra.token_ids)).encode())
        digest.update(digest_values(extra.values))
    return digest.hexdigest(20)


def type_name(values: np.ndarray) -> str:
    """Name of the type of an adapter's values, which may differ from NumPy's."""
    kind = BY_DTYPE.get(values.dtype)
    return kind.name if kind is not None else values.dtype.name


ROW = np.dtype(
    [(name, np.int32) for name in ("module_id", "layer", "rank")]
    + [(name, np.int64) for name in ("a", "b")]
    + [("scale", np.float64)]
)


@dataclass(frozen=True, eq=False)
class FileRows:
    """Rows that are one pair of matrices each, stored in a file as in the tensor format, without DoRA.

    file: its name. dtype: float32 or bfloat16. table: [rows] of ROW, in the order of an adapter's rows. a, b:
    offsets of A [rank, in] and B [out, rank] in the file. scale: of B.
    """

    file: str
    dtype: str
    table: np.ndarray

    @classmethod
    def of(cls, file: str, dtype: str, rows: list[tuple[int, int, int, int, int, float]]) -> FileRows:
        table = np.array(rows, ROW)
        return cls(file, dtype, table[np.lexsort((table["module_id"], table["layer"]))])


@dataclass(frozen=True, eq=False)
class FileAdapter(CheckedAdapter):
    """Like `Adapter`, but without values and extras. No values are in memory and no file is open.

    open: yields a descriptor of the file. Raises AdapterChangedError on entry or exit if the file is not the
    one whose digest was computed.
    """

    digest: str
    stored: FileRows
    open: Callable[[], AbstractContextManager[int]]
    extras: tuple[LoraExtra, ...] = ()

    @property
    def nbytes(self) -> int:
        """0: the values are still in the file."""
        return 0

    def shapes(self, modules: Mapping[int, LoraModule]) -> list[RowShape]:
        """The shapes of its rows in pages, as in `Adapter.shapes`."""
        rows = self.stored.table[["module_id", "layer", "rank"]].tolist()
        formats = {rank: RowFormat(rank) for _, _, rank in rows}
        return [RowShape(modules[one].at(layer), layer, formats[rank]) for one, layer, rank in rows]


@dataclass(frozen=True, eq=False)
class AdapterContent:
    """What a reader found in files. rows: sorted by layer and module. stored: where the rows are in the file,
    if they are stored there as they are served and there are no extras."""

    rows: list[AdapterRow]
    extras: list[LoraExtra]
    stored: FileRows | None = None
