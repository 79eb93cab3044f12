"""Records of a run, and the report of them: figures, and text in the order and words of trtllm-bench."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from manylora.doors.cli.prepare_dataset import BenchRequest

TIERS = {"device": "warm", "host": "host_cold", "disk": "disk_cold", "wire": "wire_cold"}
"""`Answer.adapter_tier` -> the name in reports."""
RANKS = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True)
class Answer:
    """A completed request. Times in seconds of `time.monotonic`; None and empty: not known."""

    first_token: float | None
    num_input_tokens: int
    num_output_tokens: int
    token_ids: tuple[int, ...] = ()
    text: str | None = None
    adapter_tier: str = ""


@dataclass(frozen=True)
class Record:
    """One request. started: when it was sent. error: None if it was answered."""

    request: BenchRequest
    started: float
    finished: float
    answer: Answer | None
    error: str | None = None

    @property
    def ttft_ms(self) -> float | None:
        first = self.answer.first_token if self.answer else None
        return None if first is None else (first - self.started) * 1e3


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


def _answered(records: Sequence[Record]) -> list[tuple[Record, Answer]]:
    return [(record, record.answer) for record in records if record.answer is not None]


def _streaming(done: Sequence[tuple[Record, Answer]]) -> dict[str, dict[str, float]] | None:
    """Percentiles of the time to first token, of the mean time between later ones, and of its inverse."""
    ttfts = [record.ttft_ms for record, _ in done if record.ttft_ms is not None]
    if not ttfts:
        return None
    tpots = [
        (record.finished - answer.first_token) * 1e3 / (answer.num_output_tokens - 1)
        for record, answer in done
        if answer.first_token is not None and answer.num_output_tokens > 1
    ] or [0.0]
    return {
        "ttft_ms": percentiles(ttfts),
        "tpot_ms": percentiles(tpots),
        "output_speed_tok_s": percentiles([1e3 / tpot if tpot else 0.0 for tpot in tpots]),
    }


def issue_rate(records: Sequence[Record]) -> float | None:
    """Requests sent per second. None if all were sent at once."""
    started = [record.started for record, _ in _answered(records)]
    duration = max(started) - min(started)
    return (len(started) - 1) / duration if duration > 0 else None


def tier_figures(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """Number of requests and time to first token by where the adapter was found. Empty ones are left out."""
    groups: dict[str, list[Record]] = {tier: [] for tier in ("base", *TIERS.values(), "unknown")}
    for record, answer in _answered(records):
        groups[TIERS.get(answer.adapter_tier, "unknown") if record.request.lora else "base"].append(record)
    figures: dict[str, dict[str, Any]] = {}
    for tier, group in groups.items():
        if group:
            figures[tier] = {"num_requests": len(group)}
            known = [record.ttft_ms for record in group if record.ttft_ms is not None]
            if known:
                figures[tier]["ttft_ms"] = percentiles(known)
    return figures


def dataset_details(records: Sequence[Record]) -> dict[str, Any]:
    done = _answered(records)
    inputs = [answer.num_input_tokens for _, answer in done]
    outputs = [record.request.output_tokens for record, _ in done]
    return {
        "num_sequences": len(done),
        "isl_stats": percentiles(inputs),
        "osl_stats": percentiles(outputs),
        "seq_len_stats": percentiles([i + o for i, o in zip(inputs, outputs, strict=True)]),
    }


WIDTH = 63
LABELS = {  # in the order in which they are shown
    "model": "Model",
    "model_path": "Model Path",
    "version": "manylora Version",
    "dtype": "Dtype",
    "kv_cache_dtype": "KV Cache Dtype",
    "quantization": "Quantization",
    "name": "Machine",
    "device": "Device",
    "memory": "Memory (GiB)",
    "cores": "CPU cores",
    "num_requests": "Number of requests",
    "num_failed": "Number of failed requests",
    "avg_num_concurrent_requests": "Number of concurrent requests",
    "avg_input_length": "Average Input Length (tokens)",
    "avg_output_length": "Average Output Length (tokens)",
    "tp_size": "TP Size",
    "pp_size": "PP Size",
    "ep_size": "EP Size",
    "max_batch_size": "Max Runtime Batch Size",
    "max_num_tokens": "Max Runtime Tokens",
    "scheduling_policy": "Scheduling Policy",
    "kv_cache_percentage": "KV Memory Percentage",
    "issue_rate": "Issue Rate (req/sec)",
    "request_throughput_req_s": "Request Throughput (req/sec)",
    "system_output_throughput_tok_s": "Total Output Throughput (tokens/sec)",
    "system_total_throughput_tok_s": "Total Token Throughput (tokens/sec)",
    "total_latency_ms": "Total Latency (ms)",
    "avg_request_latency_ms": "Average request latency (ms)",
    "output_throughput_per_user_tok_s": "Per User Output Throughput [w/ ctx] (tps/user)",
    "output_throughput_per_gpu_tok_s": "Per GPU Output Throughput (tps/gpu)",
    "num_draft_tokens": "Draft tokens",
    "num_accepted_draft_tokens": "Accepted draft tokens",
    "draft_acceptance_rate": "Acceptance rate",
    "acceptance_length": "Tokens of a step with a draft",
}
STREAMING = {
    "ttft_ms": ("Average time-to-first-token [TTFT] (ms)", "TTFT"),
    "tpot_ms": ("Average time-per-output-token [TPOT] (ms)", "TPOT"),
    "output_speed_tok_s": ("Per User Output Speed (tps/user)", "GTPS"),
}
DATASET = {"isl_stats": "Input", "osl_stats": "Output", "seq_len_stats": "Seq. Length"}
TIER_NAMES = {
    "base": "Base model",
    "warm": "Warm (on the device)",
    "host_cold": "Host-cold",
    "disk_cold": "Disk-cold",
    "wire_cold": "Wire-cold (sent along)",
    "unknown": "Not known",
}
CACHE = {
    "device_loads": "Host to device copies",
    "host_evictions": "Evictions from the host",
    "device_evictions": "Evictions from the device",
}


def render(report: Mapping[str, Any]) -> str:
    """report: as written by `--report_json`."""
    return "\n".join(_lines(report))


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    yield from _section("PYTORCH BACKEND", report["engine"])
    yield from _section("MACHINE DETAILS", report["machine"])
    yield from _section("REQUEST DETAILS", report["request_info"])
    yield from _section("WORLD + RUNTIME INFORMATION", report["world_info"])
    yield from _section("PERFORMANCE OVERVIEW", report["performance"])
    streaming = report["streaming_metrics"]
    if streaming:
        for key, (name, _) in STREAMING.items():
            yield _line(name, streaming[key]["average"])
        for key, (_, short) in STREAMING.items():
            yield from ("", f"-- Per-Request {short} percentiles")
            yield from _percentiles(short, streaming[key])
    yield from ("", "-- Request Latency Breakdown (ms) -----------------------", "")
    yield from _percentiles("Latency", report["performance"]["request_latency_percentiles_ms"])
    if report["decoding_stats"]:
        yield from _section("DECODING", report["decoding_stats"])
    adapters, dataset = report["adapters"], report["dataset"]
    if adapters["num_distinct"]:
        yield from _heading("ADAPTERS")
        yield _line("Distinct adapters", adapters["num_distinct"])
        yield _line("Requests with an adapter", adapters["num_requests"])
        for key, name in CACHE.items():
            yield _line(name, adapters["cache"][key])
        for tier, figures in adapters["tiers"].items():
            yield from ("", f"-- {TIER_NAMES[tier]}: {figures['num_requests']} requests")
            if "ttft_ms" in figures:
                yield from _percentiles("TTFT", figures["ttft_ms"])
        if adapters["ratio"]:
            yield ""
            yield _line("Output throughput with adapters / without, same load", adapters["ratio"])
    yield from _heading("DATASET DETAILS")
    yield _line("Dataset Path", dataset["path"])
    yield _line("Number of Sequences", dataset["num_sequences"])
    yield from ("", "-- Percentiles statistics (tokens) ----------------------", "")
    yield f"{'':<10}" + "".join(f"{name:>14}" for name in DATASET.values())
    for name in dataset["isl_stats"]:
        yield f"{name:<10}" + "".join(f"{_value(float(dataset[key][name])):>14}" for key in DATASET)


def _section(title: str, values: Mapping[str, Any]) -> Iterator[str]:
    yield from _heading(title)
    yield from (_line(label, values[name]) for name, label in LABELS.items() if name in values)


def _heading(title: str) -> tuple[str, ...]:
    return "", "=" * WIDTH, f"= {title}", "=" * WIDTH


def _percentiles(name: str, values: Mapping[str, float]) -> Iterator[str]:
    for key in (*RANKS, "minimum", "maximum", "average"):
        yield f"[{name}] {key.upper():<8}: {_value(values[key])}"


def _line(label: str, value: Any) -> str:
    return f"{label + ':':<54} {_value(value)}"


def _value(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else str(value)
