"""Protects the page allocator: free + used = total under any traffic, and the order pages are reused in."""

from __future__ import annotations

import random

import pytest

from manylora.lora.pages import PageAllocator


def test_claims_from_the_front_and_reuses_the_last_released_first() -> None:
    pages = PageAllocator(8)
    assert pages.claim(1) == [0]
    assert pages.claim(7) == [1, 2, 3, 4, 5, 6, 7]
    assert pages.claim(1) is None
    pages.release([0])
    assert pages.claim(1) == [0]


def test_a_claim_is_all_or_nothing() -> None:
    pages = PageAllocator(3)
    assert pages.claim(4) is None
    assert pages.num_free == 3


def test_what_comes_next_is_what_is_claimed_next() -> None:
    pages = PageAllocator(6)
    pages.claim(3)
    pages.release([1])
    upcoming = pages.upcoming(3)
    assert upcoming == [1, 3, 4] == pages.claim(3)
    assert pages.upcoming(9) == [5]


def test_a_shared_page_is_free_after_its_last_release() -> None:
    pages = PageAllocator(1)
    [page] = pages.claim(1) or []
    pages.share(page)
    pages.release([page])
    assert pages.num_free == 0
    pages.release([page])
    assert pages.num_free == 1
    with pytest.raises(AssertionError):
        pages.release([page])


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
