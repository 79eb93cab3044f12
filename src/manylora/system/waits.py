"""Waits of an event loop: for an answer from another thread, for the end of a task."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

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


async def cancel_and_wait(task: asyncio.Task[None] | None) -> None:
    """None: it was never started."""
    if task is not None:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
