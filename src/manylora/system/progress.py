"""Progress of long operations, in bytes: lines in the log."""

from __future__ import annotations

import logging
import threading
import time

logger = logging.getLogger("manylora")

QUIET_S = 2.0  # before the first line: shorter operations only get a summary
LINE_S = 5.0  # between two lines


class Progress:
    """A context manager that logs a summary on success. Thread-safe. doing, done: "loading", "loaded"."""

    def __init__(self, doing: str, done: str, what: str, total: int) -> None:
        self._doing, self._done, self._what, self._total = doing, done, what, total
        self._lock = threading.RLock()
        self._now = 0
        self._started = time.monotonic()
        self._due = self._started + QUIET_S

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            seconds = time.monotonic() - self._started
            logger.info("%s %s: %s in %.1f s", self._done, self._what, size(self._total), seconds)

    def add(self, count: int) -> None:
        """This many more bytes are done."""
        with self._lock:
            self.set(self._now + count)

    def set(self, count: int) -> None:
        """This many bytes are done in total."""
        with self._lock:
            self._now, now = min(count, self._total), time.monotonic()
            if now < self._due:
                return
            seconds = now - self._started
            done, speed = 100 * self._now // max(1, self._total), size(int(self._now / seconds))
            amount = f"{size(self._now)} of {size(self._total)}"
            text = "%s %s: %d %%, %s, %.0f s, %s/s"
            logger.info(text, self._doing, self._what, done, amount, seconds, speed)
            self._due = now + LINE_S


def size(count: int) -> str:
    """Bytes in readable form: 1.2 GB is 1.2e9."""
    for unit, bytes_of in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= bytes_of:
            return f"{count / bytes_of:.1f} {unit}"
    return f"{count} bytes"
