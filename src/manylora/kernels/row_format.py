"""RowFormat: what one row of an adapter holds, the same from its file to the kernels.

A new kind of row is a field or an encoding here; docs/extending.md lists what else it needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np


class Encoding(IntEnum):
    """How the numbers of A and B lie in pages."""

    PLAIN = 0  # in the type of the pages, to which they are converted when they are written there
    FLOAT8 = 1  # float8_e4m3fn, widened by the kernels


NUMBER_BYTES = {Encoding.FLOAT8: 1}  # of encodings that have a size of their own
TABLE_ROW = np.dtype(
    {
        "names": ["offset", "rank", "dora", "encoding", "scale", "next"],
        "formats": ["i8", "i8", "i8", "i8", "f4", "i4"],
        "itemsize": 40,
    }
)
"""A row in the tables that kernels read: `Row` of native/lora.c, and five int64 of kernels/cuda/lora.py, of
which the last holds the scale's bits and `next`. Rank 0: there is no row. next: where the row is that is
added after this one, as each says; 0: none."""


@dataclass(frozen=True, slots=True)
class RowFormat:
    """Of one (layer, module): A [rank, in], B [out, rank] and, with DoRA, the normalised magnitude [out].

    scale: what B A x is multiplied by, beside the scaling that is in B. In pages not 1 only where the
    encoding would lose bits with the scaling in B; in a step also what a request asks for. Never with DoRA.
    """

    rank: int
    dora: bool = False
    encoding: Encoding = Encoding.PLAIN
    scale: float = 1.0

    def sizes(self, in_dim: int, out_dim: int) -> tuple[int, int, int]:
        """Numbers of A, of B and of the magnitude."""
        return self.rank * in_dim, self.rank * out_dim, out_dim if self.dora else 0

    def numbers_per_element(self, element_bytes: int) -> int:
        """How many numbers share one element of pages, of so many bytes."""
        return element_bytes // NUMBER_BYTES.get(self.encoding, element_bytes)

    def identity(self) -> tuple[object, ...]:
        """What the adapter's digest takes of it. The encoding is in the digest of the numbers."""
        return (self.rank, self.dora) if self.scale == 1 else (self.rank, self.dora, self.scale)

    def table_row(self, offset: int, next_row: int = 0) -> tuple[int, int, bool, int, float, int]:
        """As TABLE_ROW has it. offset: of A, in numbers of the encoding."""
        return offset, self.rank, self.dora, self.encoding, self.scale, next_row
