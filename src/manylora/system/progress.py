"""Progress of long operations, in bytes: one line that is rewritten on a terminal, lines in a log."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable

logger = logging.getLogger("manylora")

QUIET_S = 2.0  # before the first line: shorter operations only get a summary
LINE_S = 5.0  # between two lines of a log
REWRITE_S = 0.2  # between two updates of a terminal's line


class Progress:
    """A context manager that logs a summary on success. Thread-safe. doing, done: "loading", "loaded"."""

    def __init__(
        self, doing: str, done: str, what: str, total: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._doing, self._done, self._what, self._total = doing, done, what, total
        self._clock, self._lock = clock, threading.RLock()
        self._terminal = sys.stderr is not None and sys.stderr.isatty()
        self._now = 0
        self._started = clock()
        self._due = self._started + QUIET_S
        self._shown = 0  # characters on the terminal's line

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._rewrite("")
        if kind is None:
            seconds = self._clock() - self._started
            logger.info("%s %s: %s in %.1f s", self._done, self._what, size(self._total), seconds)

    def add(self, count: int) -> None:
        """This many more bytes are done."""
        with self._lock:
            self.set(self._now + count)

    def set(self, count: int) -> None:
        """This many bytes are done in total."""
        with self._lock:
            self._now, now = min(count, self._total), self._clock()
            if now < self._due:
                return
            seconds = now - self._started
            done, speed = 100 * self._now // max(1, self._total), size(int(self._now / seconds))
            text = (
                f"{self._doing} {self._what}: {done} %, {size(self._now)} of {size(self._total)}, "
                f"{seconds:.0f} s, {speed}/s"
            )
            if self._terminal:
                self._rewrite(text)
            else:
                logger.info("%s", text)
            self._due = now + (REWRITE_S if self._terminal else LINE_S)

    def _rewrite(self, text: str) -> None:
        """Write the terminal's line. "" removes it."""
        if not (self._terminal and (text or self._shown)):
            return
        sys.stderr.write("\r" + text.ljust(self._shown) + ("" if text else "\r"))
        sys.stderr.flush()
        self._shown = len(text)


def size(count: int) -> str:
    """Bytes in readable form: 1.2 GB is 1.2e9."""
    for unit, bytes_of in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= bytes_of:
            return f"{count / bytes_of:.1f} {unit}"
    return f"{count} bytes"
