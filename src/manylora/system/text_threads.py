"""TextThreads: threads that tokenise and decode long texts, so that short ones do not wait."""

from __future__ import annotations

import os
from concurrent.futures import Executor, ThreadPoolExecutor

LONG = 2**12
"""Texts of this many characters or tokens and more are processed on a thread."""

HUGE = 2**17  # from this on, on a single thread for such texts
THREADS = 4


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
