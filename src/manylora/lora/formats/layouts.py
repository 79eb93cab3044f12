"""PlainRows: rows of a file that are one pair of matrices each, as the tensors of a request have them. They
are read, scaled, checked and digested by compiled code. And adapters that are alike in all but their numbers,
which need no other work than that: what they have in common was judged when the first of them was read.
"""

from __future__ import annotations

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from blake3 import blake3

from manylora.kernels.loading import FILE_ROW, can_take, take_rows
from manylora.kernels.row_format import RowFormat
from manylora.lora import staging
from manylora.lora.formats.safe_files import OpenFile
from manylora.lora.number_types import BFLOAT16
from manylora.lora.tensors import AdapterRow, FileRows

THREADS = 4
MOST_ALIKE = 64  # kinds of adapters that are alike; those that were asked for longest ago are forgotten


@dataclass(frozen=True)
class PlainRows:
    """table: as the cache takes them from the file. sizes: [rows], numbers of each."""

    table: FileRows
    inputs: np.ndarray
    outputs: np.ndarray
    formats: tuple[RowFormat, ...]

    @property
    def can_be_read(self) -> bool:
        """Whether there is compiled code for it."""
        return can_take(self.table.dtype)

    def read(self, file: OpenFile, bfloat16: bool) -> list[AdapterRow] | None:
        """Rows with their digests, in float32 or, with `bfloat16`, narrowed. None: a number is not finite, or
        the file was cut short."""
        stored = self.table.table
        sizes = stored["rank"] * (self.inputs + self.outputs)
        ends = np.cumsum(sizes)
        whole = staging.take(int(ends[-1]), BFLOAT16 if bfloat16 else staging.FLOAT32)
        rows = np.empty(len(stored), FILE_ROW)
        for name in ("a", "b", "rank", "scale"):
            rows[name] = stored[name]
        rows["in"], rows["out"] = self.inputs, self.outputs
        rows["target"] = whole.ctypes.data + whole.itemsize * (ends - sizes)
        target = "bfloat16" if bfloat16 else "float32"
        threads = min(THREADS, os.cpu_count() or 1)
        digests = take_rows(file.descriptor, rows, target, self.table.dtype, threads, _digest)
        if digests is None:
            return None
        places = zip(stored["module_id"].tolist(), stored["layer"].tolist(), strict=True)
        found = zip(places, self.formats, np.split(whole, ends[:-1]), digests, strict=True)
        return [AdapterRow(*place, row, piece, digest) for place, row, piece, digest in found]


class KnownLayouts:
    """What adapters of one model have in common: rows, by what is in their configuration and in the header of
    their file. Of adapters about which there was nothing to tell. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: OrderedDict[bytes, PlainRows] = OrderedDict()

    def find(self, settings: Mapping[str, Any], file: OpenFile) -> PlainRows | None:
        """file: its header was read."""
        key = _key(settings, file)
        with self._lock:
            if (rows := self._rows.get(key)) is not None:
                self._rows.move_to_end(key)
            return rows

    def keep(self, settings: Mapping[str, Any], file: OpenFile, rows: PlainRows) -> None:
        """settings, file: as of `find`; these settings and this header were judged."""
        with self._lock:
            self._rows[_key(settings, file)] = rows
            if len(self._rows) > MOST_ALIKE:
                self._rows.popitem(last=False)


def _digest(content: memoryview) -> bytes:
    return blake3(content).digest()


def _key(settings: Mapping[str, Any], file: OpenFile) -> bytes:
    names = settings.get("target_modules")  # PEFT writes a set, in any order
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        settings = {**settings, "target_modules": sorted(names)}
    said = json.dumps(settings).encode()
    sizes = f"{len(said)} {file.size} {file.name}\n".encode()
    return blake3(sizes).update(said).update(file.header).digest()
