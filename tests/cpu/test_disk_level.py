"""Protects the copies of adapters on disk: what comes back is what went in, or nothing; within the bound."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from manylora.adapters.catalog.levels import DiskLevel
from manylora.adapters.number_types import BFLOAT16
from manylora.adapters.tensors import Adapter, AdapterRow, adapter_from_rows
from manylora.kernels.row_format import Encoding, RowFormat
from manylora.request import LoraExtra

SIZE = 8 * 4000


def adapter(seed: int, kind: str = "float32") -> Adapter:
    values = np.random.default_rng(seed).normal(size=4000).astype(np.float32)
    payload = values.astype(np.float16).view(BFLOAT16) if kind == "bfloat16" else values
    payload = (values > 0).view("V1") if kind == "float8" else payload
    formats = [RowFormat(8), RowFormat(8, dora=True)]
    if kind == "float8":
        formats = [RowFormat(8, encoding=Encoding.FLOAT8, scale=scale) for scale in (0.3, 0.6)]
    rows = [AdapterRow(1, layer, formats[layer], payload[layer:]) for layer in (0, 1)]
    extras = [LoraExtra("embed.tokens", values[:20].reshape(10, 2), tuple(range(10)))]
    return adapter_from_rows(rows, extras=extras)


def path(folder: Path, one: Adapter) -> Path:
    return folder / f"{one.digest}.safetensors"


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float8"])
def test_a_copy_is_the_adapter(tmp_path: Path, kind: str) -> None:
    one, disk = adapter(0, kind), DiskLevel(10 * SIZE, tmp_path)
    disk.put_soon(one)
    disk.close()
    found = DiskLevel(10 * SIZE, tmp_path).get(one.digest)
    assert found is not None and found.digest == one.digest
    for theirs, ours in zip(found.rows, one.rows, strict=True):
        assert theirs.payload.dtype == ours.payload.dtype
        assert theirs.payload.tobytes() == ours.payload.tobytes()
        assert theirs.format == ours.format
    np.testing.assert_array_equal(found.extras[0].values, one.extras[0].values)


def test_what_was_used_longest_ago_goes_and_nobody_elses_files(tmp_path: Path) -> None:
    most = 4 * SIZE
    one, other = DiskLevel(most, tmp_path), DiskLevel(most, tmp_path)  # as of two processes
    (tmp_path / "mine.safetensors").write_bytes(b"x" * most)
    adapters = [adapter(seed) for seed in range(8)]
    for number, disk in enumerate((one, other, one)):
        disk.put(adapters[number])
        time.sleep(0.01)
    assert other.get(adapters[0].digest) is not None
    for late in adapters[3:]:
        time.sleep(0.01)
        one.put(late)
        assert one.get(adapters[0].digest) is not None
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 2 * most
    assert other.get(adapters[1].digest) is None and other.get(adapters[7].digest) is not None
    assert (tmp_path / "mine.safetensors").exists()


def test_what_is_damaged_or_of_another_content_counts_as_absent(tmp_path: Path) -> None:
    disk, (one, two, three) = DiskLevel(99 * SIZE, tmp_path), map(adapter, range(3))
    for each in (one, two):
        disk.put(each)
    content = path(tmp_path, one).read_bytes()
    path(tmp_path, three).write_bytes(content)
    path(tmp_path, one).write_bytes(content[:-100] + b"!" + content[-99:])
    os.truncate(path(tmp_path, two), 5000)
    for bad in (one, two, three):
        assert disk.get(bad.digest) is None
        assert not path(tmp_path, bad).exists()
