"""Pages of fixed size: which are in use (PageAllocator, for KV blocks and adapters), and which adapter of one
cache level has which (Space). No tensors.

An adapter has pages of its own, or, if it is small, an equal part of a page that it shares with others of its
size. Matrices shared by several adapters have their own pages, too, which are kept as long as any of these
adapters.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice


class PageAllocator:
    """Pages 0 .. num_pages - 1, each free or referenced at least once. A released page is claimed next, so a
    small working set keeps touching the same memory.
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


class PagePart(int):
    """A page number that stands only for the slots from `slot` on."""

    slot: int

    def __new__(cls, page: int, slot: int) -> PagePart:
        made = super().__new__(cls, page)
        made.slot = slot
        return made


@dataclass(frozen=True)
class Need:
    """The space an adapter takes. pages: of its own. parts: 0, or the adapter takes one of this many equal
    parts of a page, of part_slots slots each. shared: what others may use, too, by key.
    """

    pages: int
    parts: int = 0
    part_slots: int = 0
    shared: Mapping[str, Need] = field(default_factory=dict)


def least_pages(needs: Iterable[Need]) -> int:
    """Pages for several adapters together, with everything they share, in an otherwise empty level."""
    claims = _claims(needs)
    counts = Counter(one.parts for one in claims if one.parts)
    whole = sum(one.pages for one in claims if not one.parts)
    return whole + sum(-(-count // parts) for parts, count in counts.items())


def most_pages(needs: Iterable[Need]) -> int:
    """The same if every part is on a different page."""
    return sum(one.pages for one in _claims(needs))


def _claims(needs: Iterable[Need]) -> list[Need]:
    """The needs, and what they share, each once."""
    needs = list(needs)
    return [*needs, *{key: one for need in needs for key, one in need.shared.items()}.values()]


@dataclass(eq=False)
class SharedPages:
    """Pages shared by several adapters. users: their number. filled: set by whoever wrote the content."""

    need: Need
    pages: Sequence[int]
    users: int = 0
    filled: bool = False


@dataclass(frozen=True, eq=False)
class Held:
    need: Need
    pages: Sequence[int]
    shared: Mapping[str, SharedPages]


class Space:
    def __init__(self, num_pages: int) -> None:
        self.pages = PageAllocator(num_pages)
        self._shared: dict[str, SharedPages] = {}
        self._parts: dict[int, dict[int, set[int]]] = {}  # parts per page -> page -> free part numbers

    def claim(self, need: Need) -> Held:
        """Claim space. The caller has checked that there is room."""
        shared = {}
        for key, one in need.shared.items():
            if key not in self._shared:
                self._shared[key] = SharedPages(one, self._claim(one))
            shared[key] = self._shared[key]
            shared[key].users += 1
        return Held(need, self._claim(need), shared)

    def release(self, held: Held) -> None:
        self._release(held.need, held.pages)
        for key, one in held.shared.items():
            one.users -= 1
            if not one.users:
                del self._shared[key]
                self._release(one.need, one.pages)

    def lacking(self, needs: Sequence[Need]) -> Shortfall:
        return Shortfall(self, needs)

    def _claim(self, need: Need) -> list[int]:
        if not need.parts:
            pages = self.pages.claim(need.pages)
            assert pages is not None
            return pages
        begun = self._parts.setdefault(need.parts, {})
        page = next((page for page, free in begun.items() if free), None)
        if page is None:
            found = self.pages.claim(1)
            assert found is not None
            [page] = found
            begun[page] = set(range(need.parts))
        part = min(begun[page])
        begun[page].remove(part)
        return [PagePart(page, part * need.part_slots)]

    def _release(self, need: Need, pages: Sequence[int]) -> None:
        if not need.parts:
            self.pages.release(pages)
            return
        begun = self._parts[need.parts]
        [part] = pages
        assert isinstance(part, PagePart)
        free = begun[int(part)]
        free.add(part.slot // need.part_slots)
        if len(free) == need.parts:
            del begun[int(part)]
            self.pages.release([int(part)])

    def check(self, held: Sequence[Held]) -> None:
        """Assert that these hold everything in use, and nothing twice."""
        self.pages.check()
        users = Counter(key for one in held for key in one.shared)
        assert users == Counter({key: one.users for key, one in self._shared.items()})
        whole: list[int] = []
        parts: list[tuple[int, int, int]] = []
        given = [(one.need, one.pages) for one in held]
        for need, pages in given + [(one.need, one.pages) for one in self._shared.values()]:
            for page in pages:
                if isinstance(page, PagePart):
                    parts.append((need.parts, int(page), page.slot // need.part_slots))
                else:
                    whole.append(page)
        begun = {page for pages in self._parts.values() for page in pages}
        assert len(whole) == len(set(whole)) and not begun & set(whole)
        assert len(whole) + len(begun) == self.pages.num_used
        assert len(parts) == len(set(parts))
        for count, pages_of in self._parts.items():
            for page, free in pages_of.items():
                taken = {part for parts_of, at, part in parts if (parts_of, at) == (count, page)}
                assert taken and taken | free == set(range(count)) and not taken & free


class Shortfall:
    """How many pages are missing for several needs together, also after hypothetical evictions."""

    def __init__(self, space: Space, needs: Sequence[Need]) -> None:
        self._space = space
        self._shared = {key: one for need in needs for key, one in need.shared.items()}
        self._wanted = [*needs, *(one for key, one in self._shared.items() if key not in space._shared)]
        self._free = space.pages.num_free
        self._users: Counter[str] = Counter()  # users that were removed
        self._gone: Counter[tuple[int, int]] = Counter()  # removed parts, by (parts, page)
        self._open: Counter[int] = Counter()  # free parts of remaining pages, by parts
        for parts, pages in space._parts.items():
            self._open[parts] = sum(map(len, pages.values()))

    @property
    def pages(self) -> int:
        """Missing pages. 0 or less: there is room."""
        counts = Counter(one.parts for one in self._wanted if one.parts)
        wanted = sum(one.pages for one in self._wanted if not one.parts)
        for parts, count in counts.items():
            wanted += -(-max(0, count - self._open[parts]) // parts)
        return wanted - self._free

    def without(self, held: Held) -> None:
        """Count as if this adapter were evicted."""
        self._give(held.need, held.pages)
        for key, one in held.shared.items():
            self._users[key] += 1
            if self._users[key] == one.users and key not in self._shared:
                self._give(one.need, one.pages)

    def _give(self, need: Need, pages: Sequence[int]) -> None:
        if not need.parts:
            self._free += len(pages)
            return
        page = need.parts, int(pages[0])
        self._gone[page] += 1
        self._open[need.parts] += 1
        if self._gone[page] + len(self._space._parts[need.parts][page[1]]) == need.parts:
            self._open[need.parts] -= need.parts
            self._free += 1
