"""The server's log: nothing that a client chose can forge a line of it, and nobody can flood it."""

from __future__ import annotations

import logging
import sys
import threading
import time
from dataclasses import dataclass

__all__ = ["Fold", "PlainFormatter", "log_to_stderr"]

MAX_LINE = 2000
MAX_TRACE = 20000
BURST = 100  # lines of one kind in WINDOW_S; of more only their number is told
WINDOW_S = 10.0


def log_to_stderr(level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PlainFormatter("%(asctime)s %(levelname)s %(message)s"))
    handler.addFilter(Fold(handler))
    logging.basicConfig(level=level.upper(), handlers=[handler])


class PlainFormatter(logging.Formatter):
    """A message is one line of printable characters; lines of a trace are indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        record.message = _printable(record.message, MAX_LINE)
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:  # noqa: N802
        trace = super().formatException(ei)  # type: ignore[arg-type]
        cut = (
            trace if len(trace) <= MAX_TRACE else f"{trace[: MAX_TRACE // 2]}\n…\n{trace[-MAX_TRACE // 2 :]}"
        )
        return "\n".join("    " + _printable(line, MAX_LINE) for line in cut.split("\n"))


def _printable(text: str, most: int) -> str:
    """Cut, and with control characters and what turns the direction of text as escapes."""
    cut = text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"
    if cut.isprintable():
        return cut
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)


@dataclass
class _Kind:
    """Lines from one place in the code. since: when its window began."""

    since: float
    num_lines: int = 0
    num_folded: int = 0


class Fold(logging.Filter):
    """Any thread. handler: gets the line that tells how many were left out, when their window is over."""

    def __init__(self, handler: logging.Handler, burst: int = BURST, window_s: float = WINDOW_S) -> None:
        super().__init__()
        self._handler, self._burst, self._window_s = handler, burst, window_s
        self._kinds: dict[tuple[str, int], _Kind] = {}
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        name = record.pathname, record.lineno
        now = time.monotonic()
        with self._lock:
            kind = self._kinds.get(name)
            if kind is None or now - kind.since >= self._window_s:
                kind = self._kinds[name] = _Kind(now)
            kind.num_lines += 1
            if kind.num_lines <= self._burst:
                return True
            kind.num_folded += 1
            if kind.num_folded == 1:
                timer = threading.Timer(kind.since + self._window_s - now, self._tell, (record, kind))
                timer.daemon = True
                timer.start()
            return False

    def _tell(self, like: logging.LogRecord, kind: _Kind) -> None:
        text = f"{kind.num_folded} more lines in {self._window_s:g} s like: {like.getMessage()[:200]}"
        told = logging.LogRecord(like.name, like.levelno, like.pathname, like.lineno, text, (), None)
        with self._handler.lock or self._lock:  # past the filter, which would count it
            self._handler.emit(told)
