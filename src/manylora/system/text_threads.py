"""Lanes: threads for work on long texts, so that who sends a book keeps nobody waiting."""

from __future__ import annotations

import os
from concurrent.futures import Executor, ThreadPoolExecutor

__all__ = ["LONG", "Lanes"]

LONG = 2**12
"""Characters, or tokens, of a text from which work on it would hold up others, and is done beside them."""

HUGE = 2**17  # of a text that takes so long that it must not stand before others
THREADS = 4


class Lanes:
    """None for short texts, a few threads for long ones, and one for all huge ones: each of these takes
    hundreds of megabytes meanwhile."""

    def __init__(self) -> None:
        self._long = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), "manylora-long-text")
        self._huge = ThreadPoolExecutor(1, "manylora-huge-text")

    def lane(self, length: int) -> Executor | None:
        """length: of the text, in characters or tokens. None: it is done at once."""
        if length < LONG:
            return None
        return self._huge if length >= HUGE else self._long

    def close(self) -> None:
        """Wait for what is under way."""
        self._long.shutdown()
        self._huge.shutdown()
