"""Protects the pages of a cache level under any traffic: none is lost, what adapters share is there once,
small ones share pages, and victims that are named are enough, and none too many."""

from __future__ import annotations

import random

import pytest

from manylora.adapters.cache.cache import AdapterCache
from manylora.adapters.pages import Held, Need, PageAllocator, PagePart, Space, least_pages, most_pages


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
