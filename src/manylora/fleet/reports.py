"""Reports: which replicas have stopped reporting, as one does that hangs or is stopped. Without Ray."""

from __future__ import annotations

from collections.abc import Mapping


class Reports:
    """A replica is silent whose last report came `silent_s` before the newest of another: when nobody is
    heard, it is not the replicas that stand still. One that has never reported counts from when it was seen.
    """

    def __init__(self, silent_s: float) -> None:
        self._silent_s = silent_s
        self._last: dict[str, tuple[int, float]] = {}  # by replica: the report's number, when it came
        self.silent: frozenset[str] = frozenset()

    def note(self, numbers: Mapping[str, int], now: float) -> None:
        """numbers: of the last report of every replica that there is; another number is another report."""
        last = {name: self._last.get(name, (number, now)) for name, number in numbers.items()}
        self._last = {
            name: seen if seen[0] == numbers[name] else (numbers[name], now) for name, seen in last.items()
        }
        newest = max((at for _, at in self._last.values()), default=now)
        self.silent = frozenset(name for name, (_, at) in self._last.items() if newest - at >= self._silent_s)
