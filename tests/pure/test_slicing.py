"""Protects the slices of tensor and pipeline parallelism: the figures of TensorRT-LLM's own tests, and that
the ranks' results together are the whole adapter's."""

from __future__ import annotations

import numpy as np
import pytest
from test_lora_geometry import DIMS, MODULES, rows

from manylora.adapters.geometry import CacheGeometry, RowShape, place_rows
from manylora.adapters.module_sizes import Split
from manylora.adapters.modules import LoraModule
from manylora.adapters.slicing import pipeline_layers, rows_of_rank, slice_row
from manylora.adapters.tensors import AdapterRow
from manylora.errors import ConfigError
from manylora.kernels.row_format import RowFormat

TINY = np.array([1, 2, 3, 4, 5, 6, 7, 8, 2, 0, 0, 2, 2, 2, 4, -2], np.float32)


def matrices(row: AdapterRow, in_dim: int, out_dim: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rank = row.format.rank
    middle, end = rank * in_dim, rank * (in_dim + out_dim)
    assert row.payload.size == end + (out_dim if row.format.dora else 0)
    a, b = row.payload[:middle].reshape(rank, in_dim), row.payload[middle:end].reshape(out_dim, rank)
    return a, b, row.payload[end:]


def random_row(module: LoraModule, rank: int, dora: bool) -> AdapterRow:
    values = np.random.default_rng(module.module_id).normal(size=module.row_elements(RowFormat(rank, dora)))
    return AdapterRow(module.module_id, 0, RowFormat(rank, dora), values.astype(np.float32))


@pytest.mark.parametrize(
    ("tp", "dora", "place"),
    [(1, False, (2, 16)), (1, True, (4, 7)), (2, False, (2, 6)), (2, True, (2, 14))],
)
def test_the_last_row_of_the_page_images(tp: int, dora: bool, place: tuple[int, int]) -> None:
    last = place_rows(rows(dora, tp), CacheGeometry(128, 18, 0, 0))[0][-1]
    assert (last.module_id, last.layer) == (12, 1)
    assert (last.page, last.slot) == place


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("module_id", sorted(DIMS))
def test_a_slice_has_the_sizes_of_the_layout(module_id: int, dora: bool) -> None:
    module = MODULES[module_id]
    row = random_row(module, 8, dora)
    half = module.share(2)
    [place], _ = place_rows([RowShape(half, 0, RowFormat(8, dora))], CacheGeometry(64, 64, 0, 0))
    for rank in range(2):
        part = slice_row(row, module, half, 2, rank)
        a, b, m = matrices(part, half.in_dim, half.out_dim)
        assert (a.size, b.size) == (place.in_size, place.out_size)
        assert part.payload.size == half.row_elements(RowFormat(8, dora))
        if dora and module.split is Split.A_COLS:
            assert m.size == module.out_dim  # the whole magnitude


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


def test_neighbours_have_the_same_key_head_where_there_are_fewer_heads_than_ranks() -> None:
    k, local = LoraModule(2, 4, 8, Split.B_ROWS), LoraModule(2, 4, 4, Split.B_ROWS)
    row = random_row(k, 2, dora=True)
    _, b, m = matrices(row, 4, 8)
    for rank in range(4):
        _, local_b, local_m = matrices(slice_row(row, k, local, 4, rank), 4, 4)
        np.testing.assert_array_equal(local_b, np.split(b, 2)[rank // 2])
        np.testing.assert_array_equal(local_m, np.split(m, 2)[rank // 2])


@pytest.mark.parametrize("module_id", [13, 14])
def test_experts_that_are_not_shared_go_round(module_id: int) -> None:
    """4 ranks, in 2 groups of experts, whose 2 ranks share the matrices of each."""
    split = Split.B_ROWS if module_id == 13 else Split.A_COLS
    whole = LoraModule(module_id, 8 * 4, 8 * 4, split, parts=(8,) * 4, experts=4)
    shared = (8 * 2, 4 * 2) if module_id == 13 else (4 * 2, 8 * 2)
    local = LoraModule(module_id, *shared, split, parts=(shared[1] // 2,) * 2, experts=2)
    row = random_row(whole, 3, dora=False)
    a, b = row.payload[: 4 * 3 * 8].reshape(4, 3, 8), row.payload[4 * 3 * 8 :].reshape(4, 8, 3)
    for rank in range(4):
        experts, half = slice(rank % 2 * 2, rank % 2 * 2 + 2), slice(rank // 2 * 4, rank // 2 * 4 + 4)
        kept = (a[experts], b[experts, half]) if module_id == 13 else (a[experts, :, half], b[experts])
        found = slice_row(row, whole, local, 4, rank).payload
        np.testing.assert_array_equal(found, np.concatenate([part.ravel() for part in kept]))


def test_fused_rows_are_cut_part_by_part() -> None:
    qkv = LoraModule(0, 4, 8, Split.B_ROWS, parts=(4, 2, 2))
    names = np.array(["q0", "q1", "q2", "q3", "k0", "k1", "v0", "v1"])
    row = random_row(qkv, 3, dora=True)
    _, b, m = matrices(row, 4, 8)
    for rank, own in enumerate((["q0", "q1", "k0", "v0"], ["q2", "q3", "k1", "v1"])):
        rows = rows_of_rank(qkv, qkv.share(2), 2, rank)
        assert names[rows].tolist() == own
        _, local_b, local_m = matrices(slice_row(row, qkv, qkv.share(2), 2, rank), 4, 4)
        np.testing.assert_array_equal(local_b, b[rows])
        np.testing.assert_array_equal(local_m, m[rows])


def test_what_cannot_be_shared_is_refused() -> None:
    qkv = LoraModule(0, 4, 9, Split.B_ROWS, parts=(6, 2, 1))
    with pytest.raises(ConfigError, match="attn_qkv has a dimension of 1, which 2 ranks cannot share"):
        qkv.share(2)
    dense = LoraModule(4, 5, 4, Split.A_COLS)
    with pytest.raises(ConfigError, match="attn_dense has a dimension of 5"):
        dense.share(2)


@pytest.mark.parametrize(
    ("layers", "pp", "counts"), [(88, 4, [22] * 4), (7, 2, [4, 3]), (7, 3, [3, 2, 2]), (1, 2, [1, 0])]
)
def test_layers_of_pipeline_ranks(layers: int, pp: int, counts: list[int]) -> None:
    shares = [pipeline_layers(layers, pp, rank) for rank in range(pp)]
    assert [len(share) for share in shares] == counts
    assert [layer for share in shares for layer in share] == list(range(layers))
