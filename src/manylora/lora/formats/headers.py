"""The header of a safetensors file, checked as strictly as the format's library does, within bounds."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from manylora.lora.bounds import Bounds
from manylora.lora.formats.opened import OpenFile

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip
MAX_KEY = 512  # characters; patterns are searched in keys
MAX_DIMS = 8
METADATA = "__metadata__"
SLICE = 2**16  # characters
BETWEEN = re.compile(r'\}\s*,\s*"')  # two entries; a name with this in it is not read


@dataclass(frozen=True)
class HeaderEntry:
    """start: of its bytes in the file, size: how many these are."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


def header_of(file: OpenFile, bounds: Bounds) -> bytes:
    """Read once, so that whoever comes later has what was judged. Raises ValueError, AdapterInvalidError."""
    if not file.header:
        length = int.from_bytes(file.read(0, 8), "little")
        if length > bounds.header_bytes:
            raise ValueError(
                f"its header has {length} bytes, that of an adapter at most {bounds.header_bytes}"
            )
        file.header = file.read(8, length)
    return file.header


def read_header(file: OpenFile, bounds: Bounds) -> dict[str, HeaderEntry]:
    """By key. The tensors lie side by side and fill the file. Raises ValueError, AdapterInvalidError."""
    header = header_of(file, bounds)
    first = 8 + len(header)
    found: dict[str, HeaderEntry] = {}
    for key, entry in _members(header.decode()):
        if key in found:
            raise ValueError(f"its header names {key[:MAX_KEY]} twice")
        if key == METADATA:
            continue
        if len(found) == bounds.tensors:
            raise ValueError(f"it holds more than {bounds.tensors} tensors, as no adapter does")
        if len(key) > MAX_KEY:
            raise ValueError(f"the name of a tensor in it is longer than {MAX_KEY} characters")
        found[key] = _entry(entry, first)
    at = first
    for one in sorted(found.values(), key=lambda one: (one.start, one.size)):
        if one.start != at:
            raise ValueError("its tensors do not lie side by side")
        at += one.size
    if at != file.size:
        raise ValueError(f"it has {file.size} bytes, by its header {at}")
    return found


def read_metadata(file: OpenFile, bounds: Bounds) -> dict[str, str]:
    """What the header says beside the tensors. Raises ValueError, AdapterInvalidError."""
    members = _members(header_of(file, bounds).decode())
    found: Any = next((value for key, value in members if key == METADATA), {})
    return found if isinstance(found, dict) else {}


def _entry(entry: Any, first: int) -> HeaderEntry:
    dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    numbers = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in (*shape, start, end))
    if not numbers or len(shape) > MAX_DIMS or start > end:
        raise ValueError("a tensor in it has no usable shape or place")
    if dtype not in BITS:
        raise ValueError(f"a tensor in it is of type {str(dtype)[:40]}, which is not known")
    if math.prod(shape) * BITS[dtype] != (end - start) * 8:
        raise ValueError("a tensor's place in it is not of the tensor's size")
    return HeaderEntry(dtype, tuple(shape), first + start, end - start)


def _members(text: str) -> Iterator[tuple[str, Any]]:
    """Keys and values of a JSON object, parsed some at a time: no other thread runs while the JSON module is
    at work, and a header may have megabytes. Raises ValueError."""
    at, start = 0, ""
    while (cut := BETWEEN.search(text, at + SLICE)) is not None:
        yield from _parse(f"{start}{text[at : cut.start() + 1]}}}")
        at, start = cut.end() - 1, "{"
    yield from _parse(start + text[at:])


def _parse(text: str) -> Iterable[tuple[str, Any]]:
    found = json.loads(text, object_pairs_hook=_unique)
    if not isinstance(found, dict):
        raise ValueError("its header is not a JSON object")
    return found.items()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("its header says something twice")
    return found
