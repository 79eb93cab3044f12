"""Reports: which replicas have stopped reporting because they hang or are stopped. Does not need Ray."""

from __future__ import annotations

from collections.abc import Mapping


class Reports:
    """A replica is silent if its last report came `silent_s` before the newest report of another. If none
    reports, the cause is not the replicas. A replica that has never reported counts from when it was first
    seen.
    """

    def __init__(self, silent_s: float) -> None:
        self._silent_s = silent_s
        self._last: dict[str, tuple[int, float]] = {}  # by replica: number of the report, and when it came
        self.silent: frozenset[str] = frozenset()

    def note(self, numbers: Mapping[str, int], now: float) -> None:
        """numbers: of the last report of every existing replica. A different number means a new report."""
        last = {name: self._last.get(name, (number, now)) for name, number in numbers.items()}
        self._last = {
            name: seen if seen[0] == numbers[name] else (numbers[name], now) for name, seen in last.items()
        }
        newest = max((at for _, at in self._last.values()), default=now)
        self.silent = frozenset(name for name, (_, at) in self._last.items() if newest - at >= self._silent_s)
