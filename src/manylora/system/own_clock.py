"""OwnClock: time in which this process could look at others, for deciding that one of them hangs."""

from __future__ import annotations

import time
from collections.abc import Callable


class OwnClock:
    """Seconds, of which no more than `longest_s` count between two readings: in a longer gap the caller stood
    still itself, as when a machine, a container or all of its processes are stopped. Nobody could do anything
    then, so it is no silence. For one thread, which must read it more often than that.
    """

    def __init__(self, longest_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._longest_s, self._clock = longest_s, clock
        self._time, self._read_at = 0.0, clock()

    def read(self) -> float:
        now = self._clock()
        self._time, self._read_at = self._time + min(now - self._read_at, self._longest_s), now
        return self._time
