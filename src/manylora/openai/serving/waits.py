"""Waits of the event loop: for the engine's thread, and for one event."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class EventQueue(Generic[Item]):
    """`put` items and then `wake`, from any thread. `take` is called on the event loop with all items so far.

    Waking is a system call and makes the event loop compete for the GIL. Call it once per engine step, not
    once per token.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, take: Callable[[list[Item]], None]) -> None:
        self._loop, self._take = loop, take
        self._items: deque[Item] = deque()
        self._waking = False
        self.put = self._items.append

    def wake(self) -> None:
        # No lock is needed: a caller that finds the flag set has put its items before `_empty` clears the
        # flag, and `_empty` takes the items after clearing it.
        if self._items and not self._waking and not self._loop.is_closed():
            self._waking = True
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        self._waking = False
        popleft = self._items.popleft
        self._take([popleft() for _ in range(len(self._items))])


class Signal:
    """Like asyncio.Event, but for one waiter, and cleared when `wait` returns."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        self._is_set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Wait until it is set, and clear it."""
        if not self._is_set:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._is_set = False
