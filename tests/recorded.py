"""Records of what each door answered, and the comparison of a later answer with its record.

A record, `tests/replay/records/DOOR.json`, holds what every machine computes alike: texts, tokens, shapes,
errors, and floats to three digits. `--replay-bits FOLDER` keeps every bit instead, in a folder that is not
committed: the first run writes it, and a later run on the same machine is compared with it.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

RECORDS = Path(__file__).with_name("replay") / "records"
DIGITS, TOLERANCE, RELATIVE = 3, 1.1e-3, 1e-4
LINE, FEW = 100, 24  # characters of a line of a record; floats of an array that are recorded
HOW = "this is a bug, or a decision: then `make replay RECORD=1` records the new answer"


class Replay:
    """The record of one door. door: the file's name. bits: folder of `--replay-bits`."""

    def __init__(self, door: str, record: bool = False, bits: Path | None = None) -> None:
        self._path = (bits or RECORDS).absolute() / f"{door}.json"
        self._exact = bits is not None
        exists = self._path.exists()
        self._known: dict[str, Any] = json.loads(self._path.read_text("utf-8")) if exists else {}
        self._writes = not exists if self._exact else record
        self._found: dict[str, Any] = {}

    def __call__(self, name: str, found: Any) -> None:
        """Compare what a scenario has found with its record; or record it. Paths and times must be gone."""
        settled = settle(found, self._exact)
        assert name not in self._found, f"there are two scenarios {name!r}"
        self._found[name] = settled
        if self._writes:
            return
        assert name in self._known, f"{name!r} is not in {self._path}: {HOW}"
        known = self._known[name]
        matched = settled if self._exact else match(known, settled)
        if matched != known:
            lines = (text.splitlines() for text in (show(known), show(matched)))
            diff = "\n".join(difflib.unified_diff(*lines, "recorded", "found", n=2, lineterm=""))
            raise AssertionError(f"{name!r} of {self._path.name} has changed ({HOW}):\n{diff}")

    def check_names(self, names: list[str]) -> None:
        """Each recorded scenario is still played. names: of all scenarios of this door."""
        if self._writes:
            self._known = {name: value for name, value in self._known.items() if name in names}
        else:
            assert set(self._known) <= set(names), f"not played: {sorted(set(self._known) - set(names))}"

    def close(self) -> None:
        if self._writes and self._found:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            content = dict(sorted((self._known | self._found).items()))
            self._path.write_text(show(content) + "\n", encoding="utf-8")


def settle(value: Any, exact: bool) -> Any:
    """As JSON. exact: with all bits of its floats; of large arrays their hash."""
    if isinstance(value, np.generic):
        value = value.item()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    if isinstance(value, np.ndarray):
        return _settle_array(value, exact)
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, Mapping):
        return {str(key): settle(one, exact) for key, one in sorted(value.items(), key=lambda p: str(p[0]))}
    if isinstance(value, list) and len(value) > FEW and all(isinstance(one, float) for one in value):
        return _settle_array(np.array(value), exact)
    if isinstance(value, list | tuple):
        return [settle(one, exact) for one in value]
    if isinstance(value, float):
        return value if exact or not math.isfinite(value) else round(value, DIGITS) + 0.0
    if value is None or isinstance(value, str | bool | int):
        return value
    raise TypeError(f"{type(value).__name__} cannot be recorded")


def _settle_array(array: np.ndarray, exact: bool) -> Any:
    if array.dtype.kind != "f":
        return settle(array.tolist(), exact)
    if exact:
        digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
        return {"shape": list(array.shape), "dtype": str(array.dtype), "sha256": digest}
    if array.size <= FEW:
        return settle(array.tolist(), exact)
    row = array.reshape(-1, array.shape[-1])
    first, mean = array.ravel()[:8].tolist(), float(np.abs(array).mean())
    shown = {"shape": list(array.shape), "first": settle(first, exact), "mean": settle(mean, exact)}
    return shown | {"largest": row.argmax(-1).tolist()}


def match(known: Any, found: Any) -> Any:
    """`found`, with the recorded floats where the two are near."""
    if isinstance(known, float) and isinstance(found, float):
        return known if abs(known - found) <= TOLERANCE + RELATIVE * abs(known) else found
    if isinstance(known, dict) and isinstance(found, dict):
        return {key: match(known.get(key), one) for key, one in found.items()}
    if isinstance(known, list) and isinstance(found, list) and len(known) == len(found):
        return [match(*pair) for pair in zip(known, found, strict=True)]
    return found


def show(value: Any, indent: int = 0) -> str:
    """JSON in which whatever fits is on one line."""
    line = json.dumps(value, ensure_ascii=False, sort_keys=True)
    if len(line) + indent <= LINE or not isinstance(value, dict | list):
        return line
    space = "\n" + " " * (indent + 1)
    if isinstance(value, list):
        if all(isinstance(one, int | float) for one in value):
            return space.join(_wrap(line, LINE - indent))
        parts, ends = [show(one, indent + 1) for one in value], "[]"
    else:
        named = ((json.dumps(key, ensure_ascii=False), one) for key, one in sorted(value.items()))
        parts, ends = [f"{key}: {show(one, indent + 1)}" for key, one in named], "{}"
    return ends[0] + space + f",{space}".join(parts) + space[:-1] + ends[1]


def _wrap(line: str, width: int) -> list[str]:
    return re.findall(rf".{{1,{width}}}(?:(?<=, )|$)", line)


def without(text: str, **folders: Path) -> str:
    """The text with a name in place of each folder."""
    for name, folder in folders.items():
        text = text.replace(str(folder), f"<{name}>")
    return text


SELDOM = re.compile(r".*_(activated_tokens|draft_tokens|cold_loads|read_failures|pooled_requests)_total .*")


def metric_types(text: str) -> list[str]:
    """Names and types of our metrics, apart from those that only some requests make."""
    found = re.findall(r"^# TYPE ((?:manylora_|nv_trt_llm_|nv_llm_|vllm:).*)$", text, re.MULTILINE)
    return sorted(one for one in found if not SELDOM.fullmatch(one))
