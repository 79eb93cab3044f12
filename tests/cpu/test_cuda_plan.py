"""Protects the tables of the adapter kernels: every row in one tile, slots written once and never under a
running adapter."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from manylora.adapters.modules import LoraModuleId
from manylora.kernels.cuda.plan import MODULES, PLACE, TILE, Places, plan_lora, rank_class, tile_size
from manylora.kernels.row_format import Encoding, RowFormat
from manylora.kernels.spec import LoraRow, LoraSegment

ONE = int(np.float32(1).view(np.int32))  # bits of the scale of a row that has none


def adapter(number: int, rank: int = 8, modules: tuple[int, ...] = (1, 3)) -> dict[tuple[int, int], LoraRow]:
    rows = {m: LoraRow(1000 * number + m, RowFormat(rank, m == 3)) for m in modules}
    return {(layer, m): row for layer in (0, 1) for m, row in rows.items()}


def segments(lengths: list[int], rows: list[dict]) -> list[LoraSegment]:
    starts = np.cumsum([2, *(n + 1 for n in lengths)])  # base rows between
    return [LoraSegment(int(s), int(s) + n, r) for s, n, r in zip(starts, lengths, rows, strict=False)]


@pytest.mark.parametrize("lengths", [[1, 1, 1], [1, 20, 3], [200, 1, 70]])
def test_tiles_cover_each_adapters_rows_once(lengths: list[int]) -> None:
    parts = segments(lengths, [adapter(i) for i in range(3)])
    plan = plan_lora(parts, Places(4, 2), parts[-1].stop + 1)
    covered = {}
    for first, count, slot, _ in plan.tiles.tolist():
        assert 1 <= count <= plan.tile_size
        for row in range(first, first + count):
            assert row not in covered
            covered[row] = slot
    slots = [plan.updates[i].slot for i in range(3)]
    want = {
        row: slot for part, slot in zip(parts, slots, strict=True) for row in range(part.start, part.stop)
    }
    assert covered == want
    assert plan.row_slots.tolist() == [want.get(row, -1) for row in range(parts[-1].stop + 1)]


def test_places_say_where_each_layer_and_module_lies() -> None:
    plan = plan_lora(segments([1], [adapter(7, rank=5)]), Places(2, 2), 4)
    [update] = plan.updates
    assert update.places.shape == (2, MODULES, PLACE)
    assert update.places[1, 1].tolist() == [7001, 5, 0, 0, ONE, -1]
    assert update.places[0, 3].tolist() == [7003, 5, 1, 0, ONE, -1]
    assert update.places[0, 2].tolist() == [0, 0, 0, 0, 0, 0]
    assert plan.kinds.modules == {1, 3}
    assert (plan.kinds.rank, plan.tile_size, plan.kinds.encodings) == (16, 1, frozenset())


def test_every_module_has_a_place() -> None:
    last = max(LoraModuleId)
    plan = plan_lora(segments([1], [adapter(7, modules=(last,))]), Places(2, 2), 4)
    assert last < MODULES
    assert plan.updates[0].places[1, last].tolist() == [7000 + last, 8, 0, 0, ONE, -1]


def test_places_say_what_is_in_8_bits_and_its_scale() -> None:
    narrow = {(0, 1): LoraRow(64, RowFormat(5, encoding=Encoding.FLOAT8, scale=-0.75))}
    plan = plan_lora(segments([1, 1], [adapter(0), narrow]), Places(2, 2), 9)
    offset, rank, dora, encoding, bits, vectors = plan.updates[1].places[0, 1].tolist()
    assert (offset, rank, dora, encoding) == (64, 5, 0, Encoding.FLOAT8) and vectors == -1
    assert plan.kinds.encodings == {Encoding.FLOAT8}
    assert np.int64(bits).astype(np.int32).view(np.float32) == -0.75


def test_a_padded_plan_has_few_empty_tiles() -> None:
    plan = plan_lora(segments([4, 1], [adapter(0), adapter(1)]), Places(4, 2), 32, fixed=True)
    assert plan.tiles.shape == (4, TILE)
    assert plan.tiles[2:, 1].sum() == 0
    one = plan_lora(segments([128], [adapter(0)]), Places(4, 2), 136, fixed=True)
    assert (one.tile_size, len(one.tiles), int((one.tiles[:, 1] > 0).sum())) == (16, 17, 8)
    many = plan_lora(segments([200], [adapter(0)]), Places(4, 2), 208, fixed=True)
    assert many.tile_size == 16, "prompt tiles are for prompts"


def test_slots_are_written_once_and_the_idle_one_gives_way() -> None:
    places = Places(2, 2)
    a, b, c = adapter(0), adapter(1), adapter(2)

    def slots(*rows: dict) -> tuple[list[int], int]:
        plan = plan_lora(segments([1] * len(rows), list(rows)), places, 9)
        return plan.tiles[:, 2].tolist(), len(plan.updates)

    assert slots(a, b) == ([0, 1], 2)
    assert slots(b, a) == ([1, 0], 0)
    assert slots(b) == ([1], 0)
    assert slots(c, b) == ([0, 1], 1), "a was idle"
    assert slots(a) == ([1], 1), "b was there before c"
    # Other places under equal values are another adapter: pages moved.
    assert slots(dict(a)) == ([0], 1)
    assert slots(a, b, c) == ([1, 0, 2], 2), "a batch that needs more slots gets more"
    assert places.num_slots == 4


def test_adapters_that_are_mixed_are_linked() -> None:
    places, first = Places(2, 2), adapter(0, rank=40)
    more = (LoraRow(7, RowFormat(5, scale=-0.5)), LoraRow(9, RowFormat(16)))
    rows = {place: replace(row, more=more[: place[1] - 1]) for place, row in first.items()}  # of module 3
    plan = plan_lora(segments([1], [rows]), places, 4)
    assert plan.kinds.mixed and plan.kinds.rank == 512, "40, 5 and 16 in blocks of 32"
    found = {update.slot: update.places for update in plan.updates}
    slots = [update.slot for update in plan.updates]
    linked = [(slots[1] + 1) << 32, (slots[2] + 1) << 32, 0]
    for slot, link in zip(slots, linked, strict=True):
        assert found[slot][1, 3, 4] >> 32 == link >> 32
        assert found[slot][1, 1, 4] >> 32 == 0
    assert found[slots[1]][0, 3, :2].tolist() == [7, 5]
    assert places.num_slots == 4
    scaled = {place: replace(row, format=RowFormat(8, scale=2.0)) for place, row in first.items()}
    assert plan_lora(segments([1], [scaled]), places, 4).kinds.mixed
    assert not plan_lora(segments([1], [first]), places, 4).kinds.mixed


@pytest.mark.parametrize("rows", [1, 4, 40])
def test_padded_plans_have_two_numbers_of_tiles(rows: int) -> None:
    """For any way of sharing the rows out over adapters."""
    found: dict[int, set[int]] = {1: set(), 16: set()}
    for count in range(1, rows + 1):
        for covered in {count, min(rows, 2 * count), rows}:
            bounds = [covered * i // count for i in range(count + 1)]
            uneven = [0, *range(covered - count + 1, covered + 1)]  # one adapter has nearly all rows
            for cut in (bounds, uneven):
                parts = [LoraSegment(a, b, adapter(i)) for i, (a, b) in enumerate(pairwise(cut))]
                plan = plan_lora(parts, Places(rows, 2), rows, fixed=True)
                found[plan.tile_size].add(len(plan.tiles))
    assert all(len(numbers) <= 2 for numbers in found.values())


def test_classes() -> None:
    classes = {1: 16, 16: 16, 17: 64, 64: 64, 65: 512, 512: 512, 513: 1024, 1024: 1024}
    assert {rank: rank_class(rank) for rank in classes} == classes
    assert [tile_size(n) for n in ([1, 1], [1, 2, 9], [500, 1], [8, 8])] == [1, 16, 64, 16]


def test_recorded_steps_know_few_sets_of_modules() -> None:
    def having(*modules: int) -> dict:
        return {(0, module): LoraRow(0, RowFormat(8)) for module in modules}

    places = Places(8, 2)

    def planned(rows: dict, fixed: bool = True) -> frozenset[int]:
        return plan_lora(segments([1], [rows]), places, 4, fixed).kinds.modules

    everything = having(1, 2, 3, 4, 5, 6, 7)
    assert planned(everything) == set(range(1, 8))
    assert planned(having(1, 3)) == planned(having(2)) == {1, 2, 3}
    assert planned(having(4)) == planned(having(1, 4)) == {1, 2, 3, 4}
    assert planned(having(7)) == set(range(1, 8))
    assert planned(having(1, 3), fixed=False) == {1, 3}, "a step that is launched plainly has what it needs"
