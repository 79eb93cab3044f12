"""Metrics in Prometheus text format: those that Triton also exports, HTTP's, and those of gateways. History:
throughput and latency of the last minutes, as points of equal duration.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from manylora.doors.triton.metrics import (
    FAMILIES,
    LORA_INFO,
    MetricFamily,
    RequestMeter,
    Sample,
    engine_samples,
)
from manylora.request import Event, LoraInput, LoraMix
from manylora.stats import EngineStats

POINT_S = 2.0
MAX_POINTS = 150  # five minutes
SUMMARY_POINTS = 30  # one minute
MAX_TIMES = 2000  # recorded sequences per point
ESCAPED = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Labels = tuple[tuple[str, str], ...]
# Names that inference gateways look for by default.
GATEWAY_METRICS = {
    "vllm:num_requests_waiting": MetricFamily("Requests that wait"),
    "vllm:num_requests_running": MetricFamily("Sequences under way"),
    "vllm:kv_cache_usage_perc": MetricFamily("KV cache in use, from 0 to 1"),
    "vllm:gpu_cache_usage_perc": MetricFamily("KV cache in use, from 0 to 1 (older name)"),
    "vllm:cache_config_info": MetricFamily("Shape of the KV cache, in labels"),
    "vllm:spec_decode_num_drafts_total": MetricFamily("Drafts that were verified", "counter"),
    "vllm:spec_decode_num_draft_tokens_total": MetricFamily("Tokens of drafts", "counter"),
    "vllm:spec_decode_num_accepted_tokens_total": MetricFamily(
        "Tokens of drafts that were accepted", "counter"
    ),
}
HTTP_METRICS = {
    "manylora_alias_requests_total": MetricFamily(
        "Requests for an alias of several models, by the model that was chosen", "counter"
    ),
    "manylora_http_requests_total": MetricFamily("Answers by route and status", "counter"),
    "manylora_catalog_adapters": MetricFamily("Adapters in the catalog by state"),
    "manylora_pinned_adapters": MetricFamily("Adapters by name that are kept in the cache"),
    "manylora_usage_log_dropped_total": MetricFamily("Lines of the usage log that were lost", "counter"),
    "manylora_adapter_read_failures_total": MetricFamily(
        "Adapters that could not be read, by code", "counter"
    ),
    "manylora_clients_left_total": MetricFamily(
        "Requests whose client left before the end of the answer", "counter"
    ),
}


class Metrics:
    """Counters and histograms of finished requests; `render` adds gauges. Event loop only."""

    def __init__(self, model: str) -> None:
        self._model = (("model_name", model),)
        self._meter = RequestMeter()
        self._counters: dict[str, dict[Labels, float]] = defaultdict(lambda: defaultdict(float))
        self._histograms: dict[str, dict[Labels, _Histogram]] = defaultdict(dict)

    def count_response(self, route: str, status: int) -> None:
        labels = (("route", route), ("status", str(status)))
        self._counters["manylora_http_requests_total"][labels] += 1
        if status == 499:
            self.count_disconnect()

    def count_disconnect(self) -> None:
        """A client disconnected before its response, or in the middle of a stream."""
        self._counters["manylora_clients_left_total"][()] += 1

    def meter(self, lora: LoraInput | LoraMix | None, event: Event, waited_s: float, read_s: float) -> None:
        """Count a sequence that has ended. waited_s: before the engine had its request. read_s: of that, for
        its adapter to be read.
        """
        for sample in self._meter.samples(lora, event, waited_s, read_s):
            family = FAMILIES[sample.family]
            if family.kind == "histogram":
                by_labels = self._histograms[sample.family]
                by_labels.setdefault(sample.labels, _Histogram(family.buckets)).observe(sample.value)
            else:
                self._counters[sample.family][sample.labels] += sample.value

    def render(self, stats: EngineStats, more: Iterable[Sample] = ()) -> str:
        """more: of the catalog and the aliases."""
        samples: dict[str, list[tuple[Labels, float]]] = defaultdict(list)
        # Triton exports what is unknown here of its engine.
        known = [one for one in engine_samples(stats) if stats.kv_blocks or one.family == LORA_INFO]
        for one in [*known, *self._gateway(stats), *more]:
            samples[one.family].append((one.labels, one.value))
        for name, values in self._counters.items():
            samples[name] += values.items()
        lines: list[str] = []
        for name, family in {**FAMILIES, **GATEWAY_METRICS, **HTTP_METRICS}.items():
            if name in samples or name in self._histograms:
                lines += [f"# HELP {name} {family.help}", f"# TYPE {name} {family.kind}"]
                lines += [f"{name}{_label_text(labels)} {_number(value)}" for labels, value in samples[name]]
                for labels, histogram in self._histograms.get(name, {}).items():
                    lines += histogram.lines(name, labels)
        return "\n".join(lines) + "\n"

    def _gateway(self, stats: EngineStats) -> Iterator[Sample]:
        yield Sample("vllm:num_requests_waiting", self._model, stats.waiting)
        yield Sample("vllm:num_requests_running", self._model, stats.running)
        if not stats.kv_blocks:  # Triton's engine: its KV cache is unknown here
            return
        used = (stats.kv_blocks - stats.kv_blocks_free) / stats.kv_blocks
        yield Sample("vllm:kv_cache_usage_perc", self._model, used)
        yield Sample("vllm:gpu_cache_usage_perc", self._model, used)
        shape = (("block_size", str(stats.tokens_per_block)), ("num_gpu_blocks", str(stats.kv_blocks)))
        yield Sample("vllm:cache_config_info", (*self._model, *shape), 1)
        if stats.drafts:
            yield Sample("vllm:spec_decode_num_drafts_total", self._model, stats.drafts)
            yield Sample("vllm:spec_decode_num_draft_tokens_total", self._model, stats.draft_tokens)
            accepted = "vllm:spec_decode_num_accepted_tokens_total"
            yield Sample(accepted, self._model, stats.accepted_draft_tokens)


class _Histogram:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * len(bounds)
        self._count, self._sum = 0, 0.0

    def observe(self, value: float) -> None:
        self._count += 1
        self._sum += value
        for i, bound in enumerate(self._bounds):
            self._counts[i] += value <= bound

    def lines(self, name: str, labels: Labels) -> Iterator[str]:
        for bound, count in zip((*self._bounds, "+Inf"), (*self._counts, self._count), strict=True):
            yield f"{name}_bucket{_label_text((*labels, ('le', str(bound))))} {count}"
        yield f"{name}_sum{_label_text(labels)} {_number(self._sum)}"
        yield f"{name}_count{_label_text(labels)} {self._count}"


def _label_text(labels: Iterable[tuple[str, str]]) -> str:
    inside = ",".join(f'{name}="{value.translate(ESCAPED)}"' for name, value in labels)
    return f"{{{inside}}}" if inside else ""


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))


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
        counts = {"number": self.number, "running": self.running, "waiting": self.waiting}
        return counts | _figures([self])


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
        return _figures(list(self._points)[-SUMMARY_POINTS:])


def _figures(points: Sequence[Point]) -> dict[str, float | None]:
    """Rates, and percentiles by nearest rank in milliseconds."""
    seconds = sum(one.seconds for one in points) or 1.0
    found: dict[str, float | None] = {
        "tokens_per_s": round(sum(one.tokens for one in points) / seconds, 1),
        "requests_per_s": round(sum(one.sequences for one in points) / seconds, 2),
    }
    for name, field in (("ttft", "first_token"), ("latency", "latency")):
        times = sorted(value for one in points for value in getattr(one, field))
        for part, suffix in ((0.5, "p50_ms"), (0.95, "p95_ms")):
            at = min(len(times) - 1, int(part * len(times)))
            found[f"{name}_{suffix}"] = round(1000 * times[at], 1) if times else None
    return found
