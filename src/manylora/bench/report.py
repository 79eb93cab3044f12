"""Throughput and latency figures, computed from the records of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from manylora.bench.load import Answer, Record

TIERS = {"device": "warm", "host": "host_cold", "disk": "disk_cold", "wire": "wire_cold"}
"""`Answer.adapter_tier` -> the name in reports."""

RANKS = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """minimum, maximum, average and pXX: the sorted values' element at index floor(XX % of n)."""
    ordered = sorted(values)
    count = len(ordered)
    found = {"minimum": ordered[0], "maximum": ordered[-1], "average": sum(ordered) / count}
    return found | {name: ordered[min(int(count * part), count - 1)] for name, part in RANKS.items()}


def measure(records: Sequence[Record], *, streaming: bool) -> dict[str, Any]:
    """The report's sections about answered requests. Raises ValueError if there are none."""
    done = _answered(records)
    if not done:
        reason = next((record.error for record in records if record.error), "there was none")
        raise ValueError(f"no request was answered: {reason}")
    total = max(record.finished for record, _ in done) - min(record.started for record, _ in done)
    inputs = sum(answer.num_input_tokens for _, answer in done)
    outputs = sum(answer.num_output_tokens for _, answer in done)
    latencies = [record.finished - record.started for record, _ in done]
    speeds = [a.num_output_tokens / latency for (_, a), latency in zip(done, latencies, strict=True)]
    latency_ms = percentiles([latency * 1e3 for latency in latencies])
    return {
        "request_info": {
            "num_requests": len(done),
            "num_failed": len(records) - len(done),
            "avg_num_concurrent_requests": sum(latencies) / total,
            "avg_input_length": inputs / len(done),
            "avg_output_length": outputs / len(done),
        },
        "performance": {
            "total_latency_ms": total * 1e3,  # from the first that was sent to the last answer
            "avg_request_latency_ms": latency_ms["average"],
            "request_throughput_req_s": len(done) / total,
            "system_output_throughput_tok_s": outputs / total,
            "system_total_throughput_tok_s": (inputs + outputs) / total,
            "output_throughput_per_user_tok_s": sum(speeds) / len(done),  # mean of output tokens / latency
            "output_throughput_per_gpu_tok_s": outputs / total,
            "request_latency_percentiles_ms": latency_ms,
        },
        "streaming_metrics": _streaming(done) if streaming else None,
    }


def issue_rate(records: Sequence[Record]) -> float | None:
    """Requests sent per second. None if all were sent at once."""
    started = [record.started for record, _ in _answered(records)]
    duration = max(started) - min(started)
    return (len(started) - 1) / duration if duration > 0 else None


def tier_figures(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """Number of requests and time to first token, by where the adapter was found, and for the base model.

    Tiers without requests are omitted, and so are times if no first token is known.
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
    done = _answered(records)
    inputs = [answer.num_input_tokens for _, answer in done]
    outputs = [record.request.output_tokens for record, _ in done]
    return {
        "num_sequences": len(done),
        "isl_stats": percentiles(inputs),
        "osl_stats": percentiles(outputs),
        "seq_len_stats": percentiles([i + o for i, o in zip(inputs, outputs, strict=True)]),
    }


def _answered(records: Sequence[Record]) -> list[tuple[Record, Answer]]:
    return [(record, record.answer) for record in records if record.answer is not None]


def _streaming(done: Sequence[tuple[Record, Answer]]) -> dict[str, dict[str, float]] | None:
    """Percentiles of the time to first token, of each request's mean time between later tokens, and of its
    tokens per second after the first token.
    """
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
    return {
        "ttft_ms": percentiles(ttfts),
        "tpot_ms": percentiles(tpots),
        "output_speed_tok_s": percentiles([1e3 / tpot if tpot else 0.0 for tpot in tpots]),
    }


def _ttft_ms(record: Record) -> float | None:
    first = record.answer.first_token if record.answer else None
    return None if first is None else (first - record.started) * 1e3
