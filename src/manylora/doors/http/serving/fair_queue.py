"""FairQueue: which request goes to the engine next."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import AsyncIterator

from manylora.doors.http.api import errors

Waiter = tuple["asyncio.Future[None]", int]


class FairQueue:
    """Limits the sequences in the engine. Belongs to the event loop. max_waiting: sequences; 0: no limit.

    capacity: in sequences; more than the engine's batch, so that it always has work.
    """

    def __init__(self, capacity: int, max_waiting: int = 0) -> None:
        self.capacity, self._max_waiting = capacity, max_waiting
        self._active = 0
        self._waiting: OrderedDict[str, deque[Waiter]] = OrderedDict()  # the first key is the next one served
        self.num_waiting = 0  # sequences

    @property
    def waiting_keys(self) -> list[str]:
        return list(self._waiting)

    @contextlib.asynccontextmanager
    async def turn(self, key: str, cost: int) -> AsyncIterator[None]:
        """Wait for a slot. key: the adapter, or "". cost: sequences. Raises ApiError 429 if too many wait."""
        if not self._waiting and self._fits(cost):
            self._active += cost
        else:
            await self._wait(key, cost)
        try:
            yield
        finally:
            self._leave(cost)

    def check_room(self, cost: int) -> None:
        """Whether that many sequences of one request can run or wait. Raises ApiError 429."""
        room = max(0, self.capacity - self._active) + self._max_waiting - self.num_waiting
        if self._max_waiting and cost > max(1, room):
            raise errors.queue_full()

    async def _wait(self, key: str, cost: int) -> None:
        if self._max_waiting and self.num_waiting and self.num_waiting + cost > self._max_waiting:
            raise errors.queue_full()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append((turn, cost))
        self.num_waiting += cost
        try:
            await turn
        except asyncio.CancelledError:
            line = self._waiting.get(key, ())
            if turn.done() and not turn.cancelled():
                self._leave(cost)
            elif (turn, cost) in line:
                self._waiting[key].remove((turn, cost))
                self.num_waiting -= cost
                if not line:
                    del self._waiting[key]
            raise

    def _leave(self, cost: int) -> None:
        self._active -= cost
        while self._waiting:
            key, line = next(iter(self._waiting.items()))
            turn, next_cost = line[0]
            if not self._fits(next_cost):
                return
            line.popleft()
            self.num_waiting -= next_cost
            self._waiting.move_to_end(key)
            if not line:
                del self._waiting[key]
            self._active += next_cost
            if turn.done():  # cancelled at the same moment: `_wait` will not return the slot
                self._active -= next_cost
            else:
                turn.set_result(None)

    def _fits(self, cost: int) -> bool:
        return self._active == 0 or self._active + cost <= self.capacity
