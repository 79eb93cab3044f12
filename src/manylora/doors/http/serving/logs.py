"""The server's log, protected against clients: they can neither forge lines nor flood it."""

from __future__ import annotations

import logging
import sys
import threading
import time
from dataclasses import dataclass

MAX_LINE = 2000
MAX_TRACE = 20000
BURST = 100  # lines per call site in WINDOW_S; further lines are only counted
WINDOW_S = 10.0


def log_to_stderr(level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PlainFormatter("%(asctime)s %(levelname)s %(message)s"))
    handler.addFilter(RateLimit(handler))
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


@dataclass
class _LineCounter:
    """Lines from one call site. since: when its window started."""

    since: float
    num_lines: int = 0
    num_dropped: int = 0


class RateLimit(logging.Filter):
    """Drops lines over the limit. Any thread. handler: gets a line with their number when the window ends."""

    def __init__(self, handler: logging.Handler, burst: int = BURST, window_s: float = WINDOW_S) -> None:
        super().__init__()
        self._handler, self._burst, self._window_s = handler, burst, window_s
        self._sources: dict[tuple[str, int], _LineCounter] = {}
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        name = record.pathname, record.lineno
        now = time.monotonic()
        with self._lock:
            source = self._sources.get(name)
            if source is None or now - source.since >= self._window_s:
                source = self._sources[name] = _LineCounter(now)
            source.num_lines += 1
            if source.num_lines <= self._burst:
                return True
            source.num_dropped += 1
            if source.num_dropped == 1:
                left_s = source.since + self._window_s - now
                timer = threading.Timer(left_s, self._log_dropped, (record, source))
                timer.daemon = True
                timer.start()
            return False

    def _log_dropped(self, like: logging.LogRecord, source: _LineCounter) -> None:
        text = f"{source.num_dropped} more lines in {self._window_s:g} s like: {like.getMessage()[:200]}"
        summary = logging.LogRecord(like.name, like.levelno, like.pathname, like.lineno, text, (), None)
        with self._handler.lock or self._lock:  # bypasses the filter, which would count it
            self._handler.emit(summary)
