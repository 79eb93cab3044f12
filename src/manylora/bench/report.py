"""Throughput and latency figures, computed from the records of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from manylora.bench.load import Answer, Record

TIERS = {"device": "warm", "host": "host_cold", "disk": "disk_cold", "wire": "wire_cold"}
"""`Answer.adapter_tier` -> the name in reports."""

RANKS = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True)
class Streaming:
    """Percentiles. ttft: from sending to the first token. tpot: mean time between the tokens after it, of
    each request. output_speed: tokens a second after the first token."""

    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float]
    output_speed_tok_s: dict[str, float]


@dataclass(frozen=True)
class Performance:
    """Figures of the requests that were answered."""

    num_requests: int
    num_failed: int
    avg_num_concurrent_requests: float
    avg_input_length: float
    avg_output_length: float
    issue_rate: float  # requests sent a second; infinite when all were sent at once
    total_latency_ms: float  # from the first that was sent to the last answer
    request_throughput_req_s: float
    system_output_throughput_tok_s: float
    system_total_throughput_tok_s: float
    output_throughput_per_user_tok_s: float  # mean over requests of output tokens / latency
    output_throughput_per_gpu_tok_s: float
    request_latency_percentiles_ms: dict[str, float]
    streaming: Streaming | None

    @property
    def avg_request_latency_ms(self) -> float:
        return self.request_latency_percentiles_ms["average"]

    def request_info(self) -> dict[str, Any]:
        names = (
            "num_requests", "num_failed", "avg_num_concurrent_requests", "avg_input_length",
            "avg_output_length",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def performance(self) -> dict[str, Any]:
        names = (
            "total_latency_ms", "avg_request_latency_ms", "request_throughput_req_s",
            "system_output_throughput_tok_s", "system_total_throughput_tok_s",
            "output_throughput_per_user_tok_s", "output_throughput_per_gpu_tok_s",
            "request_latency_percentiles_ms",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def streaming_metrics(self) -> dict[str, Any] | None:
        return asdict(self.streaming) if self.streaming else None


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """minimum, maximum, average and pXX: the sorted values' element at index floor(XX % of n)."""
    ordered = sorted(values)
    count = len(ordered)
    found = {"minimum": ordered[0], "maximum": ordered[-1], "average": sum(ordered) / count}
    return found | {name: ordered[min(int(count * part), count - 1)] for name, part in RANKS.items()}


def measure(records: Sequence[Record], *, streaming: bool, num_gpus: int = 1) -> Performance:
    """num_gpus: devices that served the requests, at least 1. Raises ValueError if no request was
    answered."""
    done = [(record, record.answer) for record in records if record.answer is not None]
    if not done:
        reason = next((record.error for record in records if record.error), "there was none")
        raise ValueError(f"no request was answered: {reason}")
    first, last = min(r.started for r, _ in done), max(r.finished for r, _ in done)
    total = last - first
    inputs = sum(answer.num_input_tokens for _, answer in done)
    outputs = sum(answer.num_output_tokens for _, answer in done)
    latencies = [record.finished - record.started for record, _ in done]
    speeds = [a.num_output_tokens / latency for (_, a), latency in zip(done, latencies, strict=True)]
    issuing = max(record.started for record, _ in done) - first
    return Performance(
        num_requests=len(done),
        num_failed=len(records) - len(done),
        avg_num_concurrent_requests=sum(latencies) / total,
        avg_input_length=inputs / len(done),
        avg_output_length=outputs / len(done),
        issue_rate=(len(done) - 1) / issuing if issuing > 0 else float("inf"),
        total_latency_ms=total * 1e3,
        request_throughput_req_s=len(done) / total,
        system_output_throughput_tok_s=outputs / total,
        system_total_throughput_tok_s=(inputs + outputs) / total,
        output_throughput_per_user_tok_s=sum(speeds) / len(done),
        output_throughput_per_gpu_tok_s=outputs / total / num_gpus,
        request_latency_percentiles_ms=percentiles([latency * 1e3 for latency in latencies]),
        streaming=_streaming(done) if streaming else None,
    )


def tier_figures(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """Number of requests and time to first token, by where the adapter was found; and of the base model.

    Tiers without requests are left out, and times where no first token is known.
    """
    groups: dict[str, list[Record]] = {}
    for record in records:
        if record.answer is not None:
            lora = record.request.lora
            tier = TIERS.get(record.answer.adapter_tier, "unknown") if lora else "base"
            groups.setdefault(tier, []).append(record)
    figures: dict[str, dict[str, Any]] = {}
    for tier in ("base", *TIERS.values(), "unknown"):
        if tier in groups:
            figures[tier] = {"num_requests": len(groups[tier])}
            times = [_ttft_ms(record) for record in groups[tier]]
            known = [time for time in times if time is not None]
            if known:
                figures[tier]["ttft_ms"] = percentiles(known)
    return figures


def dataset_details(records: Sequence[Record]) -> dict[str, Any]:
    """Percentiles of the requested token counts."""
    done = [(record, record.answer) for record in records if record.answer is not None]
    inputs = [answer.num_input_tokens for _, answer in done]
    outputs = [record.request.output_tokens for record, _ in done]
    return {
        "num_sequences": len(done),
        "isl_stats": percentiles(inputs),
        "osl_stats": percentiles(outputs),
        "seq_len_stats": percentiles([i + o for i, o in zip(inputs, outputs, strict=True)]),
    }


def _streaming(done: Sequence[tuple[Record, Answer]]) -> Streaming | None:
    ttfts, tpots = [], []
    for record, answer in done:
        if answer.first_token is not None:
            ttfts.append((answer.first_token - record.started) * 1e3)
            if answer.num_output_tokens > 1:
                rest = record.finished - answer.first_token
                tpots.append(rest * 1e3 / (answer.num_output_tokens - 1))
    if not ttfts:
        return None
    tpots = tpots or [0.0]
    return Streaming(
        ttft_ms=percentiles(ttfts),
        tpot_ms=percentiles(tpots),
        output_speed_tok_s=percentiles([1e3 / tpot if tpot else 0.0 for tpot in tpots]),
    )


def _ttft_ms(record: Record) -> float | None:
    first = record.answer.first_token if record.answer else None
    return None if first is None else (first - record.started) * 1e3
