"""Protects the reading of safetensors: what the library writes comes back, a header that lies is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from manylora.adapters.formats.tensor_files import decode, encode, read_safetensors, write_safetensors
from manylora.errors import AdapterInvalidError


def write(path: Path, header: Any, values: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + values)
    return path


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    picks = np.random.default_rng(0)
    given = {
        "a": picks.normal(size=(3, 5)).astype(np.float32),
        "b": picks.normal(size=(7,)).astype(np.float16),
        "none": np.zeros((0, 4), np.float32),
        "one": np.full((), 2.5, np.float32),
    }
    save_file(given, tmp_path / "x.safetensors", {"format": "pt"})
    found = read_safetensors(tmp_path / "x.safetensors")
    assert sorted(found) == sorted(given)
    for key, values in given.items():
        np.testing.assert_array_equal(decode(key, found[key]), values.astype(np.float32))


def test_values_are_filled_in_scaled_and_checked_whatever_they_are_stored_as(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((3, 7), np.float32)
    for dtype in ("F64", "F32", "F16", "BF16"):
        path = tmp_path / f"{dtype}.safetensors"
        write_safetensors(path, {"a": encode("a", values, dtype)})
        [(key, found)] = read_safetensors(path).items()
        target = np.full((3, 7), 9, np.float32)
        found.fill(key, target, 0.5)
        np.testing.assert_array_equal(target, decode(key, found) * np.float32(0.5))
        found.fill(key, target)
        np.testing.assert_array_equal(target, decode(key, found))
        with pytest.raises(AdapterInvalidError, match="a holds a NaN or an infinity"):
            found.fill(key, target, 3e38)


def tensor(first: Any, last: Any, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


@pytest.mark.parametrize(
    ("header", "values"),
    [
        ({"a": tensor(0, 8)}, b"\0" * 7),
        ({"a": tensor(0, 8)}, b"\0" * 9),
        ({"a": tensor(0, 8), "b": tensor(4, 12)}, b"\0" * 12),
        ({"a": tensor(0, 8), "b": tensor(12, 20)}, b"\0" * 20),
        ({"a": tensor(0, 8, [3])}, b"\0" * 8),
        ({"a": tensor(0, 8, [-2])}, b"\0" * 8),
        ({"a": tensor(-8, 0)}, b"\0" * 8),
        ({"a": tensor(0, 8, [2.0])}, b"\0" * 8),
        ({"a": tensor(0, 8, [True, 2])}, b"\0" * 8),
        ({"a": tensor(0, 2**63, [2**61])}, b"\0" * 8),
        ({"a": {"dtype": "F32", "shape": [2]}}, b"\0" * 8),
        ({"a": 3}, b""),
        ([], b""),
        (b"{", b""),
        (b"", b""),
        (b"\xff\xfe", b""),
        (b"[" * 100_000, b""),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, header: Any, values: bytes) -> None:
    with pytest.raises(AdapterInvalidError, match=r"x\.safetensors is not readable"):
        read_safetensors(write(tmp_path / "x.safetensors", header, values))


def test_a_header_longer_than_the_file_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"\x01", (2**60).to_bytes(8, "little") + b"{}", (3).to_bytes(8, "little") + b"{}"):
        (tmp_path / "x.safetensors").write_bytes(content)
        with pytest.raises(AdapterInvalidError, match="not readable"):
            read_safetensors(tmp_path / "x.safetensors")
