"""Protects an adapter's values on their way in: compiled or not they are the same, checked and in place."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from levels import PARAMS, open_library

from manylora.adapters.cache.pool import AdapterPool
from manylora.adapters.geometry import CacheGeometry, Layout, Placement
from manylora.adapters.number_types import narrow_to_bfloat16, widen_bfloat16
from manylora.adapters.tensors import Adapter, AdapterRow
from manylora.kernels import loading, native
from manylora.kernels.row_format import RowFormat

# experts, rank, in, out, and how many values behind them
SHAPES = [
    (1, 16, 64, 128, 0), (1, 16, 30, 77, 77), (3, 8, 33, 65, 0), (2, 40, 50, 129, 0), (1, 1, 5, 3, 3),
    (1, 64, 300, 272, 272), (4, 17, 16, 15, 60),
]  # fmt: skip


@pytest.fixture(params=["numpy", *PARAMS])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    library = None if request.param == "numpy" else open_library(request.param)
    monkeypatch.setattr(native, "loaded", lambda: library)


def numbers(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size, np.float32)


@pytest.mark.parametrize("size", [1, 15, 16, 1000, 20003])
def test_values_are_scaled_and_checked(way: None, size: int) -> None:
    values = numbers(size)
    for scale in (1.0, 0.3, -2.0):
        kept = values.copy()
        assert loading.widen(kept, kept, np.float32(scale))
        np.testing.assert_array_equal(kept, values * np.float32(scale))
    for bad, at in product((np.inf, -np.inf, np.nan), {0, size // 2, size - 1}):
        broken = values.copy()
        broken[at] = bad
        assert not loading.widen(broken, broken, np.float32(1))
        broken.setflags(write=False)
        assert not loading.all_finite(broken) and not loading.all_finite(broken[::-1])
        assert not loading.all_finite(broken.astype(np.float16))
        assert not loading.widen(np.empty_like(broken), broken, np.float32(0.5))
    assert loading.all_finite(values) and loading.all_finite(values.astype(np.float16))
    assert loading.widen(values, values, np.float32(0)) and not values.any()
    large = np.full(size, 3e38, np.float32)
    assert loading.widen(large, large, np.float32(1)), "it is within float32's range"
    assert not loading.widen(large, large, np.float32(2))


@pytest.mark.parametrize("pages", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sent", ["float32", "bfloat16", "float16"])
def test_pages_hold_the_same_bits_either_way(way: None, sent: str, pages: torch.dtype) -> None:
    """Every type of a request's tensors into every type of pages, as torch converts them."""
    made = {"float32": np.float32, "float16": np.float16}
    placements, rows, slot = [], [], 0
    for number, (experts, rank, into, out, more) in enumerate(SHAPES):
        sizes = experts * rank * into, experts * rank * out
        count = -(-(sum(sizes) + more) // 8)
        kind = RowFormat(rank, more > 0)
        placements.append(Placement(0, slot, sum(sizes) + more, *sizes, 1, number, kind, count, experts))
        slot += count
        values = numbers(sum(sizes) + more, number)
        payload = narrow_to_bfloat16(values) if sent == "bfloat16" else values.astype(made[sent])
        rows.append(AdapterRow(1, number, kind, payload))
    layout = Layout(tuple(placements), (slot,))
    geometry = CacheGeometry(page_width=8, slots_per_page=slot, min_total_slots=slot, widest=1)
    pool = AdapterPool(geometry, 2, 2, pages, torch.device("cpu"))
    pool._host.zero_()
    pool.write_host(Adapter("", tuple(rows)), layout, [1])
    assert not pool._host[0].any()
    for row, back in zip(rows, pool.read_host("", layout, [1]).rows, strict=True):
        wide = torch.from_numpy(
            widen_bfloat16(row.payload) if sent == "bfloat16" else row.payload.astype(np.float32)
        )
        kind = torch.float32 if pages == torch.float32 else torch.int16
        assert back.payload.tobytes() == wide.to(pages).view(kind).numpy().tobytes()
