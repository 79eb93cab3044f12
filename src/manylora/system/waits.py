"""Waits of an event loop between the runs of repeated work."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

logger = logging.getLogger("manylora")


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
