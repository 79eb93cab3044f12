"""OwnClock: time in which this process itself was running, for deciding that another one hangs."""

from __future__ import annotations

import time
from collections.abc import Callable


class OwnClock:
    """Seconds, of which at most `longest_s` count between two readings: a longer gap means that the caller
    itself was stopped, perhaps others with it. Use on one thread, which must read it more often than that.
    """

    def __init__(self, longest_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._longest_s, self._clock = longest_s, clock
        self._time, self._read_at = 0.0, clock()

    def read(self) -> float:
        now = self._clock()
        self._time, self._read_at = self._time + min(now - self._read_at, self._longest_s), now
        return self._time
