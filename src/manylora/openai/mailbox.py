"""Mailbox: events from the engine's thread to the event loop, many with one wake-up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Mailbox"]

Item = TypeVar("Item")


class Mailbox(Generic[Item]):
    """`put` from any thread; `take` is called on the event loop with everything that has come."""

    def __init__(self, loop: asyncio.AbstractEventLoop, take: Callable[[list[Item]], None]) -> None:
        self._loop, self._take = loop, take
        self._lock = threading.Lock()
        self._items: list[Item] = []

    def put(self, item: Item) -> None:
        with self._lock:
            self._items.append(item)
            first = len(self._items) == 1
        if first and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        with self._lock:
            items, self._items = self._items, []
        self._take(items)
