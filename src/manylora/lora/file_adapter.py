"""FileAdapter: an adapter whose digest is known and whose values are still in its file, from which they are
read straight into its pages."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

from manylora.errors import AdapterInvalidError
from manylora.kernels.row_format import RowFormat
from manylora.lora.geometry import RowShape
from manylora.lora.modules import LoraModule
from manylora.lora.number_types import BFLOAT16, widen_bfloat16
from manylora.lora.tensors import Adapter, AdapterRow, adapter_from_rows
from manylora.request import LoraExtra

ROW = np.dtype(
    [(name, np.int32) for name in ("module_id", "layer", "rank")]
    + [(name, np.int64) for name in ("a", "b")]
    + [("scale", np.float64)]
)


@dataclass(frozen=True, eq=False)
class FileRows:
    """Rows that are one pair of matrices each, and lie in a file as the tensor format has them, without DoRA.

    file: its name; dtype: float32 or bfloat16. table: [rows] of ROW, in the order of an adapter's rows; a, b:
    where A [rank, in] and B [out, rank] begin in the file, scale: of B.
    """

    file: str
    dtype: str
    table: np.ndarray

    @classmethod
    def of(cls, file: str, dtype: str, rows: list[tuple[int, int, int, int, int, float]]) -> FileRows:
        table = np.array(rows, ROW)
        return cls(file, dtype, table[np.lexsort((table["module_id"], table["layer"]))])


@dataclass(frozen=True, eq=False)
class FileAdapter:
    """As `Adapter`, without its values and without extras. No values are in memory and no file is open.

    open: gives a descriptor of the file, and raises AdapterChangedError at its begin or end when the file is
    not the one that the digest was taken of.
    """

    digest: str
    stored: FileRows
    open: Callable[[], AbstractContextManager[int]]
    extras: tuple[LoraExtra, ...] = ()

    @property
    def nbytes(self) -> int:
        """None: the values are still in the file."""
        return 0

    def shapes(self, modules: Mapping[int, LoraModule]) -> list[RowShape]:
        """Its rows as pages take them; as `Adapter.shapes`."""
        rows = self.stored.table[["module_id", "layer", "rank"]].tolist()
        formats = {rank: RowFormat(rank) for _, _, rank in rows}
        return [RowShape(modules[module_id], layer, formats[rank]) for module_id, layer, rank in rows]

    def read(self, modules: Mapping[int, LoraModule]) -> Adapter:
        """The adapter with its values, in float32. modules: the model's. Raises AdapterInvalidError, and
        AdapterChangedError as `open`."""
        rows = []
        with self.open() as descriptor:
            for entry, shape in zip(self.stored.table, self.shapes(modules), strict=True):
                sizes = shape.module.row_sizes(shape.format)[:2]
                a, b = (
                    self._values(descriptor, int(entry[name]), size)
                    for name, size in zip("ab", sizes, strict=True)
                )
                payload = np.concatenate((a, b * np.float32(entry["scale"])))
                rows.append(AdapterRow(shape.module.module_id, shape.layer, shape.format, payload))
        return adapter_from_rows(rows, digest=self.digest)

    def _values(self, descriptor: int, offset: int, count: int) -> np.ndarray:
        dtype = BFLOAT16 if self.stored.dtype == "bfloat16" else np.dtype("<f4")
        data = os.pread(descriptor, count * dtype.itemsize, offset)
        if len(data) < count * dtype.itemsize:
            raise AdapterInvalidError(f"{self.stored.file} was cut short")
        values = np.frombuffer(data, dtype)
        return widen_bfloat16(values) if dtype == BFLOAT16 else values
