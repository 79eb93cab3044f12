"""Rows of an adapter in a file, as compiled code reads them, and the memory that it is to write them to."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from manylora.adapters.number_types import narrow_to_bfloat16, widen_bfloat16
from manylora.kernels.loading import FILE_ROW

UNTOUCHED = 0xAB
SCALES = (1.0, 0.3, -2.0)
Result = TypeVar("Result")


class RowFile:
    """Random rows in one file, B of each before its A.

    path:    of the file. content: its bytes.
    table:   [rows] of FILE_ROW, whose targets lie in this object's memory.
    numbers: of each row, as `lay_out` has put A and the scaled B together; float32.
    """

    def __init__(
        self,
        path: Path,
        shapes: Sequence[tuple[int, int, int]],
        source: str,
        target: str,
        lay_out: Callable[[np.ndarray, np.ndarray], np.ndarray],
        gap: int = 12,
    ) -> None:
        """shapes: rank, inputs, outputs of each row. source, target: "float32" or "bfloat16", in the file and
        in memory. gap: bytes between two rows in memory."""
        self.path, self.content, self.numbers = path, b"head", list[np.ndarray]()
        self._size = {"float32": 4, "bfloat16": 2}[source]
        stored = narrow_to_bfloat16 if source == "bfloat16" else np.asarray
        rows, self._expected, end = [], list[tuple[int, np.ndarray]](), 8
        for number, (rank, inputs, outputs) in enumerate(shapes):
            rng, scale = np.random.default_rng(number), SCALES[number % len(SCALES)]
            a, b = (rng.standard_normal(shape, np.float32) for shape in ((rank, inputs), (outputs, rank)))
            if source == "bfloat16":
                a, b = (widen_bfloat16(narrow_to_bfloat16(values)) for values in (a, b))
            self.numbers.append(lay_out(a, b * np.float32(scale)))
            made = narrow_to_bfloat16(self.numbers[-1]) if target == "bfloat16" else self.numbers[-1]
            b_at, a_at = len(self.content), len(self.content) + self._size * b.size
            self.content += stored(b).tobytes() + stored(a).tobytes()
            rows.append((a_at, b_at, end, rank, inputs, outputs, scale))
            self._expected.append((end, made))
            end += made.nbytes + gap
        self._memory = np.full(end + 4096, UNTOUCHED, np.uint8)
        self.table = np.array(rows, FILE_ROW)
        self.table["target"] += self._memory.ctypes.data

    def read(self, with_descriptor: Callable[[int], Result], content: bytes | None = None) -> Result:
        """What a function makes of the open file. content: other bytes than the file's own."""
        self.path.write_bytes(self.content if content is None else content)
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            return with_descriptor(descriptor)
        finally:
            os.close(descriptor)

    def check_memory(self) -> None:
        """Assert that the rows are in it, and nothing else is. After this they are no longer."""
        for start, made in self._expected:
            place = self._memory[start : start + made.nbytes]
            assert place.tobytes() == made.tobytes()
            place[:] = UNTOUCHED
        assert (self._memory == UNTOUCHED).all(), "something was written beside the rows"

    def broken(self, every: int = 1) -> Iterator[bytes]:
        """Contents that are to be refused: with a NaN or an infinity at the first or the last place of a
        matrix, in every so many rows; and one that was cut short."""
        first_of_a, last_of_b = self.table["a"][::every], self.table["a"][every // 2 :: every] - self._size
        for place in (*first_of_a, self.table["b"][-1], *last_of_b):
            for value in (np.nan, np.inf):
                changed = bytearray(self.content)
                changed[place : place + self._size] = np.array([value], np.float32).tobytes()[-self._size :]
                yield bytes(changed)
        yield self.content[:-1]
