"""Mailbox: events from the engine's thread to the event loop, many with one wake-up; Signal."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Mailbox", "Signal"]

Item = TypeVar("Item")


class Mailbox(Generic[Item]):
    """`put` and then `wake`, from any thread; `take` is called on the event loop with everything that has
    come. Waking is a system call and lets the event loop compete for the interpreter, so it is for the end
    of a step, not for a token."""

    def __init__(self, loop: asyncio.AbstractEventLoop, take: Callable[[list[Item]], None]) -> None:
        self._loop, self._take = loop, take
        self._items: deque[Item] = deque()
        self._waking = False
        self.put = self._items.append

    def wake(self) -> None:
        # Without a lock: whoever finds the flag set has put its items before the flag is cleared, and what
        # follows the clearing takes them.
        if self._items and not self._waking and not self._loop.is_closed():
            self._waking = True
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                self._loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        self._waking = False
        popleft = self._items.popleft
        self._take([popleft() for _ in range(len(self._items))])


class Signal:
    """Of one waiter on the event loop. Set before somebody waits, it is not lost."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        self._is_set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Return once it is set, and clear it."""
        if not self._is_set:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._is_set = False
