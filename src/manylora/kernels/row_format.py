"""RowFormat: what one row of an adapter contains, from its file to the kernels.

A new kind of row is a new field or encoding here. docs/extending.md lists what else it needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np


class Encoding(IntEnum):
    """How the numbers of A and B are stored in pages."""

    PLAIN = 0  # in the pages' dtype, converted when written
    FLOAT8 = 1  # float8_e4m3fn, widened by the kernels


NUMBER_BYTES = {Encoding.FLOAT8: 1}  # of encodings with their own size
TABLE_ROW = np.dtype(
    {
        "names": ["offset", "rank", "dora", "encoding", "scale", "next", "vectors"],
        "formats": ["i8", "i8", "i8", "i8", "f4", "i4", "i8"],
        "itemsize": 48,
    }
)
"""A row in the tables that kernels read: `Row` of native/lora.h, and six int64 of the GPU kernels, of
which the fifth holds the scale's bits and `next`. Rank 0: there is no row. dora: 0, 1, or DORA_MIXED. next:
where the row is that is added after this one, as each says; 0: none. vectors: offset of those of a row whose
matrices are shared; -1: it has none."""
DORA_MIXED = 2


@dataclass(frozen=True, slots=True)
class RowFormat:
    """Of one (layer, module): A [rank, in], B [out, rank] and, with DoRA, the normalised magnitude m [out].

    scale: what B A x is multiplied by, beside the scaling that is in B. In pages not 1 only where the
    encoding would lose bits with the scaling in B; in a step also what a request asks for.
    shared: A and B are stored apart, once for all rows that have the same; the row is two vectors b [out] and
    d [rank], and means diag(b) B diag(d) A. Plain numbers, never with DoRA.
    mixed: in a step only. The row's change of what the base gives is multiplied by the scale, and added to
    those of others: of DoRA that is scale * ((m - 1) W x + m B A x). DoRA that is not mixed has no scale.
    """

    rank: int
    dora: bool = False
    encoding: Encoding = Encoding.PLAIN
    scale: float = 1.0
    shared: bool = False
    mixed: bool = False

    def sizes(self, in_dim: int, out_dim: int) -> tuple[int, int, int]:
        """Numbers of A, of B, and of the vectors behind them."""
        if self.shared:
            return 0, 0, out_dim + self.rank
        return self.rank * in_dim, self.rank * out_dim, out_dim if self.dora else 0

    @property
    def matrices(self) -> RowFormat:
        """The row that A and B of a shared one are stored as."""
        return RowFormat(self.rank)

    def numbers_per_element(self, element_bytes: int) -> int:
        """How many numbers share one element of pages, of so many bytes."""
        return element_bytes // NUMBER_BYTES.get(self.encoding, element_bytes)

    def identity(self) -> tuple[object, ...]:
        """What the adapter's digest takes of it. The encoding is in the digest of the numbers."""
        if self.shared:
            return self.rank, "shared"
        return (self.rank, self.dora) if self.scale == 1 else (self.rank, self.dora, self.scale)

    def table_row(
        self, offset: int, next_row: int = 0, vectors: int = -1
    ) -> tuple[int, int, int, int, float, int, int]:
        """As TABLE_ROW has it. offset: of A, in numbers of the encoding."""
        dora = DORA_MIXED if self.dora and self.mixed else int(self.dora)
        return offset, self.rank, dora, self.encoding, self.scale, next_row, vectors
