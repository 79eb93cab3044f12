"""Converts values of adapters while loading: widens, scales and checks them, and fills their pages.

Uses the compiled kernels if the process has loaded them. NumPy takes two to three times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np

from manylora.kernels import native
from manylora.kernels.native import NARROW, WIDE

COPIED = (WIDE, NARROW, "float16")
BEGIN, LINE = b"float32\0", 64  # prefix and line size of digested data, as in native/loading.c
IN_CACHE = 2**19  # bytes read at a time before they are digested
TOGETHER = 2**20  # numbers; fewer are not worth a second thread
Digest = Callable[[memoryview], bytes]
# A row in a file: byte offsets of A [rank, in] and B [out, rank], target address, sizes, factor of B.
FILE_ROW = np.dtype(
    [(name, np.int64) for name in ("a", "b", "target", "rank", "in", "out")] + [("scale", np.float64)]
)


def widen(target: np.ndarray, source: np.ndarray, scale: np.float32) -> bool:
    """Set target = source * scale. Returns whether all results are finite.

    target: float32, contiguous. source: the same number of values, float32, or bfloat16 as uint16 bits. It
    may be the target itself, or bfloat16 in the second half of the target's memory.
    """
    library = native.loaded()
    if library is not None and source.flags.c_contiguous and target.flags.c_contiguous:
        call = library.widen_float32 if source.dtype == np.float32 else library.widen_bfloat16
        return bool(call(target.ctypes.data, source.ctypes.data, target.size, float(scale)))
    if source.dtype == np.uint16:
        np.left_shift(source, 16, out=target.view(np.uint32), dtype=np.uint32)
    elif source is not target:
        target[...] = source
    with np.errstate(over="ignore", invalid="ignore"):
        if scale != 1:
            target *= scale
    return bool(np.isfinite(target).all())


def narrow(target: np.ndarray, source: np.ndarray) -> None:
    """Set target to source in bfloat16, rounded to nearest even. target: uint16 bits. source: the same number
    of float32 values, contiguous, without NaN.
    """
    if native.loaded() is not None:
        lay_out([(source.ctypes.data, target.ctypes.data, 1, 1, 0, 0, source.size)], NARROW, WIDE, 1)
        return
    bits = source.view(np.uint32)
    target[...] = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def all_finite(values: np.ndarray) -> bool:
    """values: any NumPy floating type, any shape. Contiguous float32 needs no temporary memory."""
    if values.dtype == np.float32 and values.flags.c_contiguous:
        return widen(values, values, np.float32(1))
    return bool(np.isfinite(values).all())


def can_lay_out(target: str, source: str) -> bool:
    """Whether `lay_out` converts the source's type to the pages'. Types are NumPy's names, or bfloat16."""
    known = {target, source} == {WIDE, NARROW} or (target == source and source in COPIED)
    return known and native.loaded() is not None


def lay_out(rows: Sequence[tuple[int, ...]], target: str, source: str, threads: int) -> None:
    """Write rows to their pages: A unchanged, B [out, rank] as [rank, out]; A, B and further values of an
    expert are adjacent.

    rows: source address, of A [experts, rank, in] and B [experts, out, rank]; target address; experts; rank,
    in and out of one expert; number of following values that are copied unchanged. target, source: types for
    which `can_lay_out` is true.
    """
    # Copies without conversion depend only on the size of the type.
    kinds = [NARROW if kind == "float16" else kind for kind in (target, source)]
    library = native.loaded()
    assert library is not None
    call = getattr(library, f"lay_out_{kinds[0]}_{kinds[1]}")
    table = np.array(rows, np.int64).reshape(-1, 7)
    if threads == 1:
        call(table.ctypes.data, len(table))
        return
    with ThreadPoolExecutor(threads) as pool:
        parts = np.array_split(table, 4 * threads)  # rows differ in size
        for done in [pool.submit(call, part.ctypes.data, len(part)) for part in parts]:
            done.result()


def can_read(target: str, source: str) -> bool:
    """Whether `read_rows` can read a file's type into pages of a type."""
    return {target, source} <= {WIDE, NARROW} and native.loaded() is not None


def read_rows(descriptor: int, rows: np.ndarray, target: str, source: str, threads: int) -> bool:
    """Read rows of a file into their pages in the layout of `lay_out`, through a buffer of one matrix.

    Returns whether the file was long enough and all values are finite. descriptor: of an open file. rows:
    [count] of FILE_ROW. target, source: types for which `can_read` is true.
    """
    library = native.loaded()
    assert library is not None
    call = getattr(library, f"read_rows_{target}_{source}")
    sides = rows["rank"] * np.maximum(rows["in"], rows["out"])
    size = int(sides.max(initial=0)) * (4 if source == WIDE else 2)

    def read(part: np.ndarray) -> bool:
        part, buffer = np.ascontiguousarray(part), np.empty(size, np.uint8)
        return call(descriptor, part.ctypes.data, len(part), buffer.ctypes.data) == len(part)

    if threads == 1:
        return read(rows)
    with ThreadPoolExecutor(threads) as pool:
        return all(pool.map(read, np.array_split(rows, 4 * threads)))  # rows differ in size


def can_take(source: str) -> bool:
    """Whether `take_rows` supports a file's type and this machine."""
    return source in (WIDE, NARROW) and native.loaded() is not None


def take_rows(
    descriptor: int, rows: np.ndarray, target: str, source: str, threads: int, digest: Digest
) -> list[bytes] | None:
    """Read rows of a file into memory: A [rank, in], then B [out, rank] times its factor.

    Returns the `digest` of b"float32\\0" and the float32 numbers for each row. None: the file is too short,
    or a value is not finite. As `read_rows`; `target` is the type of the numbers in memory. digest: called on
    several threads.
    """
    library = native.loaded()
    assert library is not None
    call = getattr(library, f"take_rows_{target}_{source}")
    sizes = len(BEGIN) + 4 * rows["rank"] * (rows["in"] + rows["out"])
    rooms = -(-sizes // LINE) * LINE
    ends = np.cumsum(rooms)

    def take(bounds: tuple[int, int]) -> list[bytes]:
        found, (first, stop) = list[bytes](), bounds
        room = np.empty(max(IN_CACHE, int(rooms.max(initial=0))), np.uint8)
        while first < stop:
            starts = ends - rooms - (ends[first] - rooms[first])
            last = max(first + 1, int(np.searchsorted((starts + rooms)[:stop], IN_CACHE, "right")))
            if call(descriptor, rows[first:last].ctypes.data, last - first, room.ctypes.data) < last - first:
                break
            places = zip(starts[first:last].tolist(), sizes[first:last].tolist(), strict=True)
            found += [digest(room[place : place + size].data) for place, size in places]
            first = last
        return found

    threads = 1 if sizes.sum() < 4 * TOGETHER else threads
    shares = list(pairwise(np.linspace(0, len(rows), threads + 1).astype(int).tolist()))
    with ThreadPoolExecutor(threads) as pool:  # starts only as many threads as there is work
        others = [pool.submit(take, share) for share in shares[1:]]
        taken = [*take(shares[0]), *(one for other in others for one in other.result())]
    return taken if len(taken) == len(rows) else None
