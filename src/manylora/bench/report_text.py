"""The report as text: sections in the order and words of trtllm-bench, followed by one about adapters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

WIDTH = 63
LINES: dict[str, dict[str, str]] = {
    "engine": {
        "model": "Model",
        "model_path": "Model Path",
        "version": "manylora Version",
        "dtype": "Dtype",
        "kv_cache_dtype": "KV Cache Dtype",
        "quantization": "Quantization",
    },
    "machine": {"name": "Machine", "device": "Device", "memory": "Memory (GiB)", "cores": "CPU cores"},
    "request_info": {
        "num_requests": "Number of requests",
        "num_failed": "Number of failed requests",
        "avg_num_concurrent_requests": "Number of concurrent requests",
        "avg_input_length": "Average Input Length (tokens)",
        "avg_output_length": "Average Output Length (tokens)",
    },
    "world_info": {
        "tp_size": "TP Size",
        "pp_size": "PP Size",
        "ep_size": "EP Size",
        "max_batch_size": "Max Runtime Batch Size",
        "max_num_tokens": "Max Runtime Tokens",
        "scheduling_policy": "Scheduling Policy",
        "kv_cache_percentage": "KV Memory Percentage",
        "issue_rate": "Issue Rate (req/sec)",
    },
    "decoding_stats": {
        "num_draft_tokens": "Draft tokens",
        "num_accepted_draft_tokens": "Accepted draft tokens",
        "draft_acceptance_rate": "Acceptance rate",
        "acceptance_length": "Tokens of a step with a draft",
    },
    "performance": {
        "request_throughput_req_s": "Request Throughput (req/sec)",
        "system_output_throughput_tok_s": "Total Output Throughput (tokens/sec)",
        "system_total_throughput_tok_s": "Total Token Throughput (tokens/sec)",
        "total_latency_ms": "Total Latency (ms)",
        "avg_request_latency_ms": "Average request latency (ms)",
        "output_throughput_per_user_tok_s": "Per User Output Throughput [w/ ctx] (tps/user)",
        "output_throughput_per_gpu_tok_s": "Per GPU Output Throughput (tps/gpu)",
    },
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
    yield from _section("PYTORCH BACKEND", report, "engine")
    yield from _section("MACHINE DETAILS", report, "machine")
    yield from _section("REQUEST DETAILS", report, "request_info")
    yield from _section("WORLD + RUNTIME INFORMATION", report, "world_info")
    yield from _section("PERFORMANCE OVERVIEW", report, "performance")
    streaming = report["streaming_metrics"]
    if streaming:
        for key, (name, _) in STREAMING.items():
            yield _line(name, streaming[key]["average"])
        for key, (_, short) in STREAMING.items():
            yield ""
            yield f"-- Per-Request {short} percentiles"
            yield from _percentiles(short, streaming[key])
    yield ""
    yield "-- Request Latency Breakdown (ms) -----------------------"
    yield ""
    yield from _percentiles("Latency", report["performance"]["request_latency_percentiles_ms"])
    if report["decoding_stats"]:
        yield from _section("DECODING", report, "decoding_stats")
    if report["adapters"]["num_distinct"]:
        yield from _adapters(report["adapters"])
    yield from _dataset(report["dataset"])


def _adapters(adapters: Mapping[str, Any]) -> Iterator[str]:
    yield from _heading("ADAPTERS")
    yield _line("Distinct adapters", adapters["num_distinct"])
    yield _line("Requests with an adapter", adapters["num_requests"])
    for key, name in CACHE.items():
        yield _line(name, adapters["cache"][key])
    for tier, figures in adapters["tiers"].items():
        yield ""
        yield f"-- {TIER_NAMES[tier]}: {figures['num_requests']} requests"
        if "ttft_ms" in figures:
            yield from _percentiles("TTFT", figures["ttft_ms"])
    if adapters["ratio"]:
        yield ""
        yield _line("Output throughput with adapters / without, same load", adapters["ratio"])


def _dataset(dataset: Mapping[str, Any]) -> Iterator[str]:
    yield from _heading("DATASET DETAILS")
    yield _line("Dataset Path", dataset["path"])
    yield _line("Number of Sequences", dataset["num_sequences"])
    yield ""
    yield "-- Percentiles statistics (tokens) ----------------------"
    yield ""
    names = list(next(iter(dataset[key] for key in DATASET)))
    yield f"{'':<10}" + "".join(f"{name:>14}" for name in DATASET.values())
    for name in names:
        yield f"{name:<10}" + "".join(f"{_value(float(dataset[key][name])):>14}" for key in DATASET)


def _section(title: str, report: Mapping[str, Any], key: str) -> Iterator[str]:
    yield from _heading(title)
    for name, label in LINES[key].items():
        if name in report[key]:
            yield _line(label, report[key][name])


def _heading(title: str) -> Iterator[str]:
    yield ""
    yield "=" * WIDTH
    yield f"= {title}"
    yield "=" * WIDTH


def _percentiles(name: str, values: Mapping[str, float]) -> Iterator[str]:
    for key in ("p50", "p90", "p95", "p99", "minimum", "maximum", "average"):
        yield f"[{name}] {key.upper():<8}: {_value(values[key])}"


def _line(label: str, value: Any) -> str:
    return f"{label + ':':<54} {_value(value)}"


def _value(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else str(value)
