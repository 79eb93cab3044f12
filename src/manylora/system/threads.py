"""Keeps some work from delaying other work: threads of lower priority, threads
for long texts, and repeated work of an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress

logger = logging.getLogger("manylora")

LONG = 2**12
"""Texts of this many characters or tokens and more are processed on a thread."""

HUGE = 2**17  # from this on, on a single thread for such texts
THREADS = 4
NICE = 10  # such a thread gets about a tenth of a contended core, and all of an idle one


def lower_priority() -> None:
    """Lower the priority of the calling thread, and of threads that it starts later, where that is allowed. A
    slower load delays one adapter's first request; a core taken from the engine delays every token.
    """
    thread = threading.get_native_id()
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, max(NICE, os.getpriority(os.PRIO_PROCESS, thread)))


class TextThreads:
    """A few threads for long texts, and one for all huge ones, which take hundreds of megabytes each."""

    def __init__(self) -> None:
        self._long = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), "manylora-long-text")
        self._huge = ThreadPoolExecutor(1, "manylora-huge-text")

    def executor(self, length: int) -> Executor | None:
        """The threads for a text of this length, in characters or tokens. None: the caller's own thread."""
        if length < LONG:
            return None
        return self._huge if length >= HUGE else self._long

    def close(self) -> None:
        """Wait for submitted texts."""
        self._long.shutdown()
        self._huge.shutdown()


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
