"""PageAllocator: fixed-size pages, identified by number, with reference counts. For KV cache and adapters."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice


class PageAllocator:
    """Pages 0 .. num_pages - 1, each free or referenced at least once.

    A released page is put at the front of the free list and claimed next, so a small working set keeps
    touching the same memory.
    """

    def __init__(self, num_pages: int) -> None:
        self._references = [0] * num_pages
        self._free: deque[int] = deque(range(num_pages))

    @property
    def num_pages(self) -> int:
        return len(self._references)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_free

    def claim(self, count: int) -> list[int] | None:
        """`count` pages with one reference each. None, and nothing is claimed, if fewer are free."""
        if count > len(self._free):
            return None
        pages = [self._free.popleft() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def upcoming(self, count: int) -> list[int]:
        """The free pages to be claimed next, at most `count`."""
        return list(islice(self._free, count))

    def share(self, page: int) -> None:
        """Add a reference to a page in use."""
        assert self._references[page] > 0, f"page {page} is free"
        self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop one reference of each page. Pages without references become free, in the order given."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is already free"
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.appendleft(page)

    def references(self, page: int) -> int:
        return self._references[page]

    def check(self) -> None:
        """Assert that free and used pages add up. For idle times and tests."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert all((count == 0) == (page in free) for page, count in enumerate(self._references))
