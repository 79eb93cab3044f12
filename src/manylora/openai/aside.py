"""Aside: work on long texts beside the event loop, so that who sends a book keeps nobody waiting."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from manylora.text import LONG

__all__ = ["Aside"]

HUGE = 2**17  # characters of a text that takes so long that it must not stand before others
THREADS = 4

Result = TypeVar("Result")


class Aside:
    """Short texts at once, long ones on a few threads, huge ones one by one on a thread of their own: each of
    these takes hundreds of megabytes meanwhile."""

    def __init__(self) -> None:
        self._long = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), "manylora-tokenise")
        self._huge = ThreadPoolExecutor(1, "manylora-tokenise-huge")

    async def run(self, length: int, function: Callable[..., Result], *arguments: Any) -> Result:
        """length: of the text, in characters."""
        if length < LONG:
            return function(*arguments)
        threads = self._huge if length >= HUGE else self._long
        return await asyncio.get_running_loop().run_in_executor(threads, function, *arguments)
