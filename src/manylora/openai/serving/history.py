"""History: throughput and latency of the last minutes, in points of equal time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from manylora.request import Event
from manylora.stats import EngineStats

__all__ = ["POINT_S", "History", "Point"]

POINT_S = 2.0
KEPT_POINTS = 150  # five minutes
RECENT_POINTS = 30  # what the summary is of: one minute
KEPT_PER_POINT = 2000  # sequences whose times count


@dataclass(frozen=True)
class Point:
    """seconds: its real length. first_token, whole: seconds of the sequences that ended in it."""

    number: int
    seconds: float
    tokens: int
    sequences: int
    running: int
    waiting: int
    first_token: tuple[float, ...]
    whole: tuple[float, ...]

    def body(self) -> dict[str, float | None]:
        """For JSON: rates per second, times in milliseconds, None where nothing ended."""
        return {
            "number": self.number,
            "tokens_per_s": round(self.tokens / self.seconds, 1),
            "requests_per_s": round(self.sequences / self.seconds, 2),
            "running": self.running,
            "waiting": self.waiting,
            **_times(self.first_token, self.whole),
        }


class History:
    """Event loop only. `ended` is told of every sequence; `sample` is called every POINT_S."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._points: deque[Point] = deque(maxlen=KEPT_POINTS)
        self._number = self._tokens = self._metered = self._sequences = 0
        self._since = clock()
        self._first_token: list[float] = []
        self._whole: list[float] = []

    def ended(self, event: Event, waited_s: float) -> None:
        """A sequence's last event, and how long it waited before the engine had it."""
        self._sequences += 1
        metrics = event.metrics
        if metrics is None:
            return
        self._metered += metrics.output_tokens
        if metrics.first_token_ns and len(self._whole) < KEPT_PER_POINT:
            self._first_token.append(waited_s + (metrics.first_token_ns - metrics.arrival_ns) / 1e9)
            last_ns = max(metrics.last_token_ns, metrics.first_token_ns)
            self._whole.append(waited_s + (last_ns - metrics.arrival_ns) / 1e9)

    def sample(self, stats: EngineStats) -> None:
        """Close a point. Of an engine elsewhere, that counts no steps, tokens count when a sequence ends."""
        now = self._clock()
        total = stats.generated_tokens if stats.steps else self._tokens + self._metered
        self._number += 1
        self._points.append(
            Point(
                self._number,
                max(now - self._since, 1e-3),
                max(0, total - self._tokens),
                self._sequences,
                stats.running,
                stats.waiting,
                tuple(self._first_token),
                tuple(self._whole),
            )
        )
        self._tokens, self._since, self._sequences, self._metered = total, now, 0, 0
        self._first_token, self._whole = [], []

    def points(self, after: int = 0) -> list[dict[str, float | None]]:
        """Those with a larger number than `after`, oldest first."""
        return [point.body() for point in self._points if point.number > after]

    def summary(self) -> dict[str, float | None]:
        """The last minute as one point."""
        recent = list(self._points)[-RECENT_POINTS:]
        seconds = sum(point.seconds for point in recent) or 1.0
        return {
            "tokens_per_s": round(sum(point.tokens for point in recent) / seconds, 1),
            "requests_per_s": round(sum(point.sequences for point in recent) / seconds, 2),
            **_times(
                [value for point in recent for value in point.first_token],
                [value for point in recent for value in point.whole],
            ),
        }


def _times(first_token: Sequence[float], whole: Sequence[float]) -> dict[str, float | None]:
    return {
        "ttft_p50_ms": _percentile(first_token, 0.5),
        "ttft_p95_ms": _percentile(first_token, 0.95),
        "latency_p50_ms": _percentile(whole, 0.5),
        "latency_p95_ms": _percentile(whole, 0.95),
    }


def _percentile(seconds: Sequence[float], part: float) -> float | None:
    """By nearest rank, in milliseconds."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    return round(1000 * ordered[min(len(ordered) - 1, int(part * len(ordered)))], 1)
