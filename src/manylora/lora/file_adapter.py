"""FileAdapter: an adapter whose digest is known and whose values are still in its file. They are read from
there directly into its pages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

from manylora.kernels.row_format import RowFormat
from manylora.lora.geometry import RowShape
from manylora.lora.modules import LoraModule
from manylora.request import LoraExtra

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
class FileAdapter:
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
