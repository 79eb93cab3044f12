"""Waits of an event loop: for an answer from another thread, and between the runs of repeated work."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

logger = logging.getLogger("manylora")

Answer = TypeVar("Answer")


async def engine_answer(ask: Callable[[Callable[[Answer], None]], object], timeout_s: float) -> Answer:
    """Returns what `ask` passes to its callback. The callback may be called from any thread, and also after
    the timeout. Raises TimeoutError."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Answer] = loop.create_future()

    def set_answer(found: Answer) -> None:
        if not answer.done():
            answer.set_result(found)

    def take(found: Answer) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(set_answer, found)

    ask(take)
    try:
        return await asyncio.wait_for(answer, timeout_s)
    except asyncio.TimeoutError as error:  # another class than TimeoutError before Python 3.11
        raise TimeoutError from error


class Repeated:
    """Calls `work` again and again, `pause_s` after its last end, from `start` to `close`. what: named in the
    log when it fails.
    """

    def __init__(self, work: Callable[[], Awaitable[None]], pause_s: float, what: str) -> None:
        self._work, self._pause_s, self._what = work, pause_s, what
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """No effect if it was not started."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while True:
            try:
                await self._work()
            except Exception:
                logger.exception("%s failed", self._what)
            await asyncio.sleep(self._pause_s)
