"""IdleBlocks: the order in which KV blocks that nobody uses are evicted. No tensors."""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

DEFAULT_PRIORITY = 35
T = TypeVar("T", bound=Hashable)


class IdleBlocks(Generic[T]):
    """KV blocks for reuse that no sequence uses, by number or by name. The lowest priority is evicted first,
    and of equal ones the block that is idle for longest. A priority may be limited in time; then the default
    follows.
    """

    def __init__(self) -> None:
        self._levels: dict[int, OrderedDict[T, None]] = {}
        self._priority: dict[T, int] = {}
        self._expiries: list[tuple[float, T, int]] = []  # time, block, its priority until then

    def __len__(self) -> int:
        return len(self._priority)

    def __contains__(self, block: T) -> bool:
        return block in self._priority

    def __iter__(self) -> Iterator[T]:
        return iter(self._priority)

    def add(self, block: T, priority: int = DEFAULT_PRIORITY, duration_ms: int | None = None) -> None:
        self._levels.setdefault(priority, OrderedDict())[block] = None
        self._priority[block] = priority
        if duration_ms is not None and priority != DEFAULT_PRIORITY:
            heapq.heappush(self._expiries, (time.monotonic() + duration_ms / 1000, block, priority))

    def discard(self, block: T) -> None:
        priority = self._priority.pop(block, None)
        if priority is not None:
            level = self._levels[priority]
            del level[block]
            if not level:
                del self._levels[priority]

    def refresh(self, block: T) -> None:
        """It was used: of equal priorities it is now the last to be evicted."""
        self._levels[self._priority[block]].move_to_end(block)

    def pop(self) -> T:
        """Remove and return the block to evict next."""
        now = time.monotonic()
        while self._expiries and self._expiries[0][0] <= now:
            _, block, priority = heapq.heappop(self._expiries)
            if self._priority.get(block) == priority:
                self.discard(block)
                self.add(block)
        block = next(iter(self._levels[min(self._levels)]))
        self.discard(block)
        return block
