"""Protects pages of adapters: none is lost under any traffic, what adapters share is there once, victims are
enough and none too many; memory that is used again, which nobody else looks at; and the arithmetic of pages
and of ranks' slices, by the figures of TensorRT-LLM's own tests."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from manylora.adapters import staging
from manylora.adapters.cache.cache import AdapterCache
from manylora.adapters.geometry import CacheGeometry, RowShape, cache_geometry, place_rows
from manylora.adapters.modules import LoraModule, Split
from manylora.adapters.pages import Held, Need, PageAllocator, PagePart, Space, least_pages, most_pages
from manylora.adapters.slicing import slice_row
from manylora.adapters.tensors import AdapterRow
from manylora.errors import AdapterCacheFullError, ConfigError
from manylora.kernels.row_format import RowFormat


def test_random_traffic_adds_up() -> None:
    random.seed(0)
    pages, held = PageAllocator(50), []
    for _ in range(5000):
        if held and random.random() < 0.5:
            pages.release(held.pop(random.randrange(len(held))))
        elif (claimed := pages.claim(random.randint(0, 8))) is not None:
            held.append(claimed)
        pages.check()
        assert pages.num_used == sum(map(len, held))


PAIRS = {key: Need(1, parts, 64 // parts) for key, parts in (("a", 4), ("b", 2), ("c", 8))} | {"d": Need(1)}


def need(pages: int, parts: int, *keys: str) -> Need:
    shared = {key: PAIRS[key] for key in keys}
    return Need(1, parts, 64 // parts, shared) if parts else Need(pages, shared=shared)


def test_what_is_shared_is_there_once_until_the_last_goes() -> None:
    space = Space(4)
    one, two = space.claim(need(1, 4, "a")), space.claim(need(1, 4, "a"))
    assert one.shared["a"] is two.shared["a"] and one.shared["a"].users == 2
    assert space.pages.num_used == 1, "both, and what they share, are quarters of one page"
    pages = [*one.pages, *two.pages, *one.shared["a"].pages]
    assert sorted(page.slot for page in pages if isinstance(page, PagePart)) == [0, 16, 32]
    space.release(one)
    space.check([two])
    again = space.claim(need(2, 0, "a", "d"))
    assert again.shared["a"] is two.shared["a"] and space.pages.num_used == 4
    space.release(two)
    space.release(again)
    space.check([])
    assert space.pages.num_free == 4


def test_needs_together_count_what_is_shared_once() -> None:
    needs = [need(2, 0, "a", "d"), need(1, 4, "a"), need(1, 8)]
    assert most_pages(needs) == 2 + 1 + 1 + 2
    assert least_pages(needs) == 2 + 1 + 1 + 1, "of quarters the second and what is shared are on one page"
    assert [least_pages([one]) for one in needs] == [4, 1, 1]
    assert Space(5).lacking(needs).pages == 0 and Space(4).lacking(needs).pages == 1


@pytest.mark.parametrize("seed", range(4))
def test_random_traffic_of_shared_pages_adds_up(seed: int) -> None:
    picks = random.Random(seed)
    cache, held = AdapterCache(9, 9), dict[str, Held]()
    level, pinned = cache.host, set[str]()
    for number in range(1500):
        name, keys = str(number), picks.sample(sorted(PAIRS), picks.randrange(4))
        wanted = need(picks.randint(1, 3), picks.choice((0, 2, 4, 8)), *keys)
        victims = level.victims(wanted)
        if victims is None:
            lacking = level._space.lacking([wanted])
            for one, entry in level.entries.items():
                if one not in pinned:
                    lacking.without(entry.held)
            assert pinned and lacking.pages > 0, "without all others there would be room"
        else:
            if victims:
                assert level._space.lacking([wanted]).pages > 0
                kept = level._space.lacking([wanted])
                for victim in victims[:-1]:
                    kept.without(level.entries[victim].held)
                assert kept.pages > 0, "the last victim was not needed"
            for victim in victims:
                level.evict(victim)
            held[name] = level.put(name, wanted, None).held
        if level.entries and picks.random() < 0.4:
            one = picks.choice(list(level.entries))
            if one in pinned:
                level.unpin(one)
                pinned.remove(one)
            elif len(pinned) < 3:
                level.pin(one)
                pinned.add(one)
        level.check()
    assert level.num_evictions > 100


LARGE = 2**21  # elements


def place(values: np.ndarray) -> int:
    return values.ctypes.data


def test_memory_is_used_again_once_its_last_view_is_gone() -> None:
    whole = staging.take(LARGE)
    assert (whole.shape, whole.dtype, whole.flags.writeable) == ((LARGE,), np.float32, True)
    first, view = place(whole), whole[5:].reshape(3, -1)[1]
    view[:] = 3
    del whole
    larger = staging.take(2 * LARGE)
    assert place(larger) != first
    larger[:] = 4
    assert (view == 3).all()
    del view  # kept last, so given first; the room of `larger` is still in use
    assert place(staging.take(LARGE // 2)) == first
    assert (larger == 4).all()


def test_threads_never_share() -> None:
    wrong = []

    def use(number: int) -> None:
        for _ in range(40):
            mine = staging.take(LARGE)
            mine[::4096] = number
            if not (mine[::4096] == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong


TINY = np.array([1, 2, 3, 4, 5, 6, 7, 8, 2, 0, 0, 2, 2, 2, 4, -2], np.float32)
B, A = Split.B_ROWS, Split.A_COLS
# id: (in, out, split) of hidden 16, mlp 32
DIMS = {
    0: (16, 48, B), 1: (16, 16, B), 2: (16, 16, B), 3: (16, 16, B), 4: (16, 16, A), 5: (16, 32, B),
    6: (32, 16, A), 7: (16, 32, B), 8: (16, 48, B), 9: (16, 16, B), 10: (16, 16, B), 11: (16, 16, B),
    12: (16, 16, A),
}  # fmt: skip
MODULES = {i: LoraModule(i, *dims) for i, dims in DIMS.items()}
LAYOUT = """(0,0,128,192,0,0,8,5) (0,5,128,192,0,1,8,5) (0,10,64,32,1,0,4,2) (0,12,64,32,1,1,4,2)
(0,14,64,32,2,0,4,2) (0,16,64,32,2,1,4,2) (0,18,64,32,3,0,4,2) (0,20,64,32,3,1,4,2)
(0,22,64,128,4,0,8,3) (0,25,64,128,4,1,8,3) (0,28,128,128,5,0,8,4) (0,32,128,128,5,1,8,4)
(0,36,128,128,6,0,8,4) (0,40,128,128,6,1,8,4) (0,44,128,128,7,0,8,4) (0,48,128,128,7,1,8,4)
(0,52,128,192,8,0,8,5) (0,57,128,192,8,1,8,5) (0,62,64,32,9,0,4,2) (1,0,64,32,9,1,4,2)
(1,2,64,32,10,0,4,2) (1,4,64,32,10,1,4,2) (1,6,64,32,11,0,4,2) (1,8,64,32,11,1,4,2)
(1,10,64,128,12,0,8,3) (1,13,64,128,12,1,8,3)"""


def rows(dora: bool = False, tp: int = 2) -> list[RowShape]:
    small = {1, 2, 3, 9, 10, 11}
    formats = {m: RowFormat(4 if m in small else 8, dora) for m in MODULES}
    return [RowShape(MODULES[m].share(tp), layer, formats[m]) for m in MODULES for layer in (0, 1)]


def test_the_layout_of_an_adapter() -> None:
    expected = [tuple(map(int, entry.strip("()").split(","))) for entry in LAYOUT.split()]
    placed, pages = place_rows(rows(), CacheGeometry(64, 64, 0, 0))
    found = [
        (p.page, p.slot, p.in_size, p.out_size, p.module_id, p.layer, p.format.rank, p.num_slots)
        for p in placed
    ]
    assert found == expected
    assert pages == 2
    last = place_rows(rows(dora=True), CacheGeometry(64, 64, 0, 0))[0][-1]
    assert (last.page, last.slot, last.num_slots) == (1, 28, 4)


@pytest.mark.parametrize(
    ("ranks", "pages"), [([64, 64], 2), ([32, 32, 64, 24], 3), ([60, 1, 1, 1, 64, 1], 4)]
)
def test_page_counts(ranks: list[int], pages: int) -> None:
    module = LoraModule(0, 8, 12, B)
    geometry = CacheGeometry(16, 80, 0, 0)
    assert place_rows([RowShape(module, 0, RowFormat(rank)) for rank in ranks], geometry)[1] == pages


def test_geometry_from_the_model() -> None:
    halves = [module.share(2) for module in MODULES.values()]
    geometry = cache_geometry(halves, 2, optimal_rank=8, max_rank=64)
    assert (geometry.page_width, geometry.slots_per_page) == (24, 288)
    host = geometry.slots_for(0, 4, 65536)
    device = geometry.slots_for(0, 4, 16584)
    assert (geometry.pages_for("host", host), geometry.pages_for("device", device)) == (456, 116)
    small = cache_geometry(halves, 2, 8, 8)
    assert small.pages_for("host", small.slots_for(100_000_000, 4)) == 3617
    with pytest.raises(
        ConfigError, match="Not enough space allocated to host LoRA cache to hold 1 max sized"
    ):
        geometry.pages_for("host", 10)


@pytest.mark.parametrize(
    ("kv", "tp", "rank", "loras", "expected"),
    [
        (4096, 1, 8, 2, (8192, 768, 1536, 2, 768)),
        (1024, 1, 16, 4, (5120, 1024, 12288, 12, 1844)),
        (1024, 2, 8, 2, (4608, 1024, 3072, 3, 854)),
    ],
)
def test_capacity_in_adapters(kv: int, tp: int, rank: int, loras: int, expected: tuple) -> None:
    modules = [LoraModule(1, 4096, 4096, B), LoraModule(2, 4096, kv, B), LoraModule(3, 4096, kv, B)]
    geometry = cache_geometry([one.share(tp) for one in modules], 32, min(8, rank), min(64, rank))
    slots = geometry.slots_for(0, 2, rank * 96 * loras)
    pages = geometry.pages_for("device", slots)
    assert (geometry.page_width, geometry.slots_per_page, slots, pages, geometry.min_total_slots) == expected


def store(cache: AdapterCache, digest: str, num_pages: int) -> None:
    victims = cache.host_victims(num_pages, (), force=False)
    if victims is None:
        raise AdapterCacheFullError("host")
    for victim in victims:
        cache.evict(victim)
    cache.host.put(digest, num_pages, None)


def test_the_levels_fill_and_refuse() -> None:
    cache = AdapterCache(15, 11)
    for i in range(15):
        store(cache, str(i), 1)
        cache.host.pin(str(i))
    assert cache.host_victims(1, (), force=True) is None
    for i in range(11):
        cache.load(str(i), None)
        cache.device.pin(str(i))
    with pytest.raises(AdapterCacheFullError, match="There are no done tasks to evict"):
        cache.load("11", None)
    cache.check()


def test_the_one_released_longest_ago_goes_first() -> None:
    cache = AdapterCache(2, 2)
    for name in "ab":
        store(cache, name, 1)
        cache.host.pin(name)
    cache.host.unpin("b")
    cache.host.unpin("a")
    store(cache, "c", 1)
    assert cache.on_host("a")
    assert not cache.on_host("b")


@pytest.mark.parametrize(
    ("tp", "dora", "place"), [(1, False, (2, 16)), (1, True, (4, 7)), (2, False, (2, 6)), (2, True, (2, 14))]
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
