"""History: throughput and latency of the last minutes, as points of equal duration."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from manylora.request import Event
from manylora.stats import EngineStats

POINT_S = 2.0
MAX_POINTS = 150  # five minutes
SUMMARY_POINTS = 30  # one minute
MAX_TIMES = 2000  # recorded sequences per point


@dataclass(frozen=True)
class Point:
    """sequences: that ended in it; first_token, latency: their seconds to the first and to the last token."""

    number: int
    seconds: float
    tokens: int
    sequences: int
    running: int
    waiting: int
    first_token: tuple[float, ...]
    latency: tuple[float, ...]

    def body(self) -> dict[str, float | None]:
        """As JSON. The times are None if no sequence ended."""
        return {
            "number": self.number,
            "tokens_per_s": round(self.tokens / self.seconds, 1),
            "requests_per_s": round(self.sequences / self.seconds, 2),
            "running": self.running,
            "waiting": self.waiting,
            **_times(self.first_token, self.latency),
        }


class History:
    """Event loop only. Call `ended` for every sequence, and `sample` every POINT_S."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._points: deque[Point] = deque(maxlen=MAX_POINTS)
        self._number = self._tokens = self._metered = self._sequences = 0
        self._since = clock()
        self._first_token: list[float] = []
        self._latency: list[float] = []

    def ended(self, event: Event, waited_s: float) -> None:
        """event: the last event of a sequence. waited_s: before the engine got its request."""
        self._sequences += 1
        metrics = event.metrics
        if metrics is None:
            return
        self._metered += metrics.output_tokens
        if metrics.first_token_ns and len(self._latency) < MAX_TIMES:
            self._first_token.append(waited_s + (metrics.first_token_ns - metrics.arrival_ns) / 1e9)
            last_ns = max(metrics.last_token_ns, metrics.first_token_ns)
            self._latency.append(waited_s + (last_ns - metrics.arrival_ns) / 1e9)

    def sample(self, stats: EngineStats) -> None:
        """Add a point. Triton does not count steps, so its tokens count when their sequence ends."""
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
                tuple(self._latency),
            )
        )
        self._tokens, self._since, self._sequences, self._metered = total, now, 0, 0
        self._first_token, self._latency = [], []

    def points(self, after: int = 0) -> list[dict[str, float | None]]:
        """Points with a number larger than `after`, oldest first."""
        return [point.body() for point in self._points if point.number > after]

    def summary(self) -> dict[str, float | None]:
        """The last minute as one point."""
        recent = list(self._points)[-SUMMARY_POINTS:]
        seconds = sum(point.seconds for point in recent) or 1.0
        return {
            "tokens_per_s": round(sum(point.tokens for point in recent) / seconds, 1),
            "requests_per_s": round(sum(point.sequences for point in recent) / seconds, 2),
            **_times(
                [value for point in recent for value in point.first_token],
                [value for point in recent for value in point.latency],
            ),
        }


def _times(first_token: Sequence[float], latency: Sequence[float]) -> dict[str, float | None]:
    """Percentiles by nearest rank, in milliseconds."""
    found: dict[str, float | None] = {}
    for name, seconds in (("ttft", sorted(first_token)), ("latency", sorted(latency))):
        for part, suffix in ((0.5, "p50_ms"), (0.95, "p95_ms")):
            at = min(len(seconds) - 1, int(part * len(seconds)))
            found[f"{name}_{suffix}"] = round(1000 * seconds[at], 1) if seconds else None
    return found
