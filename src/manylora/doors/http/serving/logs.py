"""The server's log, protected against clients: they can neither forge lines nor flood it."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable

MAX_LINE = 2000
MAX_TRACE = 20000
BURST = 100  # lines per call site in WINDOW_S; further lines are only counted
WINDOW_S = 10.0


def log_to_stderr(level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PlainFormatter("%(asctime)s %(levelname)s %(message)s"))
    handler.addFilter(RateLimit())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    if level != "debug":
        logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs a line per request to the hub


class PlainFormatter(logging.Formatter):
    """Formats a message as one line of printable characters. Lines of a traceback are indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        record.message = _printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:  # noqa: N802
        trace = super().formatException(ei)  # type: ignore[arg-type]
        if len(trace) > MAX_TRACE:
            trace = f"{trace[: MAX_TRACE // 2]}\n…\n{trace[-MAX_TRACE // 2 :]}"
        return "\n".join("    " + _printable(line) for line in trace.split("\n"))


def _printable(text: str) -> str:
    """The text shortened, with control characters and bidirectional marks escaped."""
    cut = text if len(text) <= MAX_LINE else f"{text[:MAX_LINE]}… ({len(text)} characters)"
    if cut.isprintable():
        return cut
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)


class RateLimit(logging.Filter):
    """Drops lines over the limit. The next line of the call site tells how many. Any thread."""

    def __init__(
        self, burst: int = BURST, window_s: float = WINDOW_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._burst, self._window_s, self._clock = burst, window_s, clock
        # By call site: when its window started, and lines in it.
        self._sources: dict[tuple[str, int], tuple[float, int]] = {}
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        name, now, dropped = (record.pathname, record.lineno), self._clock(), 0
        with self._lock:
            since, count = self._sources.get(name, (now, 0))
            if now - since >= self._window_s:
                since, count, dropped = now, 0, max(0, count - self._burst)
            self._sources[name] = since, count + 1
        if dropped:
            record.msg, record.args = f"{record.getMessage()} ({dropped} more lines like it came before)", ()
        return count < self._burst
