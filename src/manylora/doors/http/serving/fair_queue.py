"""FairQueue: which request goes to the engine next."""

from __future__ import annotations

import asyncio
import contextlib
from bisect import insort
from collections.abc import AsyncIterator
from itertools import count
from typing import NamedTuple

from manylora.doors.http.api import errors

OUTPUT_WEIGHT = 2  # an output token takes more of a step than one of a prompt
MAX_ADAPTERS = 4096  # whose tokens are remembered


class _Waiter(NamedTuple):
    """In the order of an adapter's requests. cost: sequences. tokens: of the prompt."""

    priority: int
    number: int
    turn: asyncio.Future[None]
    cost: int
    tokens: int


class FairQueue:
    """Limits the sequences in the engine. Belongs to the event loop. max_waiting: sequences; 0: no limit.

    Of requests with equal priority, that of the adapter with the fewest tokens so far is next: long prompts
    and outputs of one adapter do not take the turns of others. An adapter that did not wait for a while gets
    no more turns for it: it goes on from where the others are.

    capacity: in sequences; more than the engine's batch, so that it always has work.
    """

    def __init__(self, capacity: int, max_waiting: int = 0) -> None:
        self.capacity, self._max_waiting = capacity, max_waiting
        self._active = 0
        self._waiting: dict[str, list[_Waiter]] = {}  # by adapter, the next one first
        self._tokens: dict[str, int] = {}  # so far, by adapter
        self._level = 0  # tokens of the adapter that had the last turn, before that
        self._numbers = count()
        self.num_waiting = 0  # sequences

    @property
    def waiting_keys(self) -> list[str]:
        return list(self._waiting)

    @contextlib.asynccontextmanager
    async def turn(self, key: str, cost: int, tokens: int = 1, priority: int = 0) -> AsyncIterator[None]:
        """Wait for a slot. key: the adapter, or "". cost: sequences. tokens: of the prompt. priority: lower
        is earlier. Raises ApiError 429 if too many wait.
        """
        if not self._waiting and self._fits(cost):
            self._take_turn(key, cost, tokens)
        else:
            await self._wait(key, cost, tokens, priority)
        try:
            yield
        finally:
            self._leave(cost)

    def count_output(self, key: str, tokens: int) -> None:
        """Count the output of a sequence that has ended."""
        if key in self._tokens:
            self._tokens[key] += OUTPUT_WEIGHT * tokens

    def check_room(self, cost: int) -> None:
        """Whether that many sequences of one request can run or wait. Raises ApiError 429."""
        room = max(0, self.capacity - self._active) + self._max_waiting - self.num_waiting
        if self._max_waiting and cost > max(1, room):
            raise errors.queue_full()

    async def _wait(self, key: str, cost: int, tokens: int, priority: int) -> None:
        if self._max_waiting and self.num_waiting and self.num_waiting + cost > self._max_waiting:
            raise errors.queue_full()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(priority, next(self._numbers), turn, cost, tokens)
        if key not in self._waiting:
            self._tokens[key] = max(self._tokens.get(key, 0), self._level)
        insort(self._waiting.setdefault(key, []), waiter)
        self.num_waiting += cost
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave(cost)
            elif waiter in self._waiting.get(key, ()):
                self._remove(key, waiter)
                self._leave(0)  # it may have waited for more room than the others need
            raise

    def _leave(self, cost: int) -> None:
        self._active -= cost
        while self._waiting:
            key = min(self._waiting, key=self._rank)
            waiter = self._waiting[key][0]
            if not self._fits(waiter.cost):
                return
            self._remove(key, waiter)
            if not waiter.turn.done():  # otherwise it was cancelled at this moment
                self._take_turn(key, waiter.cost, waiter.tokens)
                waiter.turn.set_result(None)
        if not self._active:
            self._tokens.clear()
            self._level = 0

    def _rank(self, key: str) -> tuple[int, int, int]:
        first = self._waiting[key][0]
        return first.priority, self._tokens[key], first.number

    def _remove(self, key: str, waiter: _Waiter) -> None:
        self._waiting[key].remove(waiter)
        self.num_waiting -= waiter.cost
        if not self._waiting[key]:
            del self._waiting[key]

    def _take_turn(self, key: str, cost: int, tokens: int) -> None:
        self._active += cost
        sofar = max(self._tokens.pop(key, 0), self._level)
        self._level = sofar
        self._tokens[key] = sofar + max(1, tokens)  # the last in the dictionary now
        if len(self._tokens) > MAX_ADAPTERS + len(self._waiting):
            del self._tokens[next(one for one in self._tokens if one not in self._waiting)]

    def _fits(self, cost: int) -> bool:
        return self._active == 0 or self._active + cost <= self.capacity
