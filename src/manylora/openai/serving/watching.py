"""A task on the event loop that runs until its owner is closed."""

from __future__ import annotations

import asyncio
import contextlib


async def end(task: asyncio.Task[None] | None) -> None:
    """Cancel it, and wait until it has ended. None: it was never started."""
    if task is not None:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
