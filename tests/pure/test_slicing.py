"""Protects the slices of tensor and pipeline parallelism: the figures of TensorRT-LLM's own tests. That the
ranks' results together are the whole adapter's: tests/cpu/test_parallel_model.py."""

from __future__ import annotations

import numpy as np
import pytest
from test_lora_geometry import rows

from manylora.adapters.geometry import CacheGeometry, place_rows
from manylora.adapters.module_sizes import Split
from manylora.adapters.modules import LoraModule
from manylora.adapters.slicing import slice_row
from manylora.adapters.tensors import AdapterRow
from manylora.errors import ConfigError
from manylora.kernels.row_format import RowFormat

TINY = np.array([1, 2, 3, 4, 5, 6, 7, 8, 2, 0, 0, 2, 2, 2, 4, -2], np.float32)


@pytest.mark.parametrize(
    ("tp", "dora", "place"),
    [(1, False, (2, 16)), (1, True, (4, 7)), (2, False, (2, 6)), (2, True, (2, 14))],
)
def test_the_last_row_of_the_page_images(tp: int, dora: bool, place: tuple[int, int]) -> None:
    last = place_rows(rows(dora, tp), CacheGeometry(128, 18, 0, 0))[0][-1]
    assert (last.module_id, last.layer) == (12, 1)
    assert (last.page, last.slot) == place


def test_the_tiny_example() -> None:
    row = AdapterRow(1, 0, RowFormat(2), TINY)
    for split, parts in (
        (Split.B_ROWS, ([1, 2, 3, 4, 5, 6, 7, 8, 2, 0, 0, 2], [1, 2, 3, 4, 5, 6, 7, 8, 2, 2, 4, -2])),
        (Split.A_COLS, ([1, 2, 5, 6, 2, 0, 0, 2, 2, 2, 4, -2], [3, 4, 7, 8, 2, 0, 0, 2, 2, 2, 4, -2])),
    ):
        module = LoraModule(1, 4, 4, split)
        for rank, part in enumerate(parts):
            assert slice_row(row, module, module.share(2), 2, rank).payload.tolist() == part
    router = LoraModule(16, 4, 4, Split.NONE)
    assert slice_row(row, router, router.share(2), 2, 1) is row


def test_what_cannot_be_shared_is_refused() -> None:
    qkv = LoraModule(0, 4, 9, Split.B_ROWS, parts=(6, 2, 1))
    with pytest.raises(ConfigError, match="attn_qkv has a dimension of 1, which 2 ranks cannot share"):
        qkv.share(2)
    dense = LoraModule(4, 5, 4, Split.A_COLS)
    with pytest.raises(ConfigError, match="attn_dense has a dimension of 5"):
        dense.share(2)
