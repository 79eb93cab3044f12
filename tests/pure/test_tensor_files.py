"""Protects the reading of safetensors: what the library writes comes back, scaled and checked. Headers that
lie: tests/cpu/test_hostile_adapters.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from manylora.adapters.formats.tensor_files import decode, encode, read_safetensors, write_safetensors
from manylora.errors import AdapterInvalidError


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
