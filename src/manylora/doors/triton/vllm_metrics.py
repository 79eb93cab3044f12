"""VllmMetrics: the metrics of vllm_backend, with vLLM's names."""

from __future__ import annotations

import queue
from collections.abc import Mapping
from typing import Any

from manylora.doors.triton.metrics import MetricFamily
from manylora.doors.triton.prompts import Answer, PromptRequest

FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
NEXT_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
WHOLE = (1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
SAMPLES = (1.0, 2.0, 5.0, 10.0, 20.0)


def families(longest: int) -> dict[str, MetricFamily]:
    """Families by name. longest: tokens of a prompt and its output."""
    counts, power = list[float](), 1  # 1, 2, 5, 10, 20, 50, … up to `longest`
    while power <= longest:
        counts += [float(step * power) for step in (1, 2, 5) if step * power <= longest]
        power *= 10
    histograms = {
        "vllm:time_to_first_token_seconds": ("Time to first token", FIRST_TOKEN),
        "vllm:time_per_output_token_seconds": ("Time per token after the first", NEXT_TOKEN),
        "vllm:e2e_request_latency_seconds": ("Time of a whole request", WHOLE),
        "vllm:request_prompt_tokens": ("Tokens of a prompt", tuple(counts)),
        "vllm:request_generation_tokens": ("Generated tokens of a request", tuple(counts)),
        "vllm:request_params_n": ("Outputs that a request asks for", SAMPLES),
    }
    return {
        "vllm:prompt_tokens_total": MetricFamily("Tokens of prompts", "counter"),
        "vllm:generation_tokens_total": MetricFamily("Generated tokens", "counter"),
        **{name: MetricFamily(text, "histogram", buckets) for name, (text, buckets) in histograms.items()},
    }


class VllmMetrics:
    """pb_utils: triton_python_backend_utils. labels: on every metric."""

    def __init__(self, pb_utils: Any, labels: Mapping[str, str], longest: int) -> None:
        self._finished: queue.SimpleQueue[tuple[PromptRequest, Answer]] = queue.SimpleQueue()
        self._metrics, self._families = {}, []
        for name, one in families(longest).items():
            kind = getattr(pb_utils.MetricFamily, one.kind.upper())
            family = pb_utils.MetricFamily(name=name, description=one.help, kind=kind)
            self._families.append(family)  # keeps the family, without which its metrics end
            buckets = {"buckets": list(one.buckets)} if one.buckets else {}
            self._metrics[name] = family.Metric(labels=dict(labels), **buckets)

    def observe(self, asked: PromptRequest, answer: Answer) -> None:
        """Record a finished answer, with its statistics. Thread-safe."""
        self._finished.put((asked, answer))

    def close(self) -> None:
        """Call this in the model's `finalize`: a metric that is released later crashes the process."""
        self._metrics.clear()
        self._families.clear()

    def write(self) -> None:
        """Write what was recorded. One thread only: two threads on one metric crash the server."""
        while not self._finished.empty():
            for name, value in samples(*self._finished.get()):
                metric = self._metrics[name]
                if name.endswith("_total"):
                    metric.increment(value)
                else:
                    metric.observe(value)


def samples(asked: PromptRequest, answer: Answer) -> list[tuple[str, float]]:
    """Names and values. Times are those of the sequence that ended last."""
    prompt, output = len(answer.prompt), sum(len(one.token_ids) for one in answer.outputs)
    found: list[tuple[str, float]] = [
        ("vllm:prompt_tokens_total", prompt),
        ("vllm:generation_tokens_total", output),
        ("vllm:request_prompt_tokens", prompt),
        ("vllm:request_generation_tokens", output),
        ("vllm:request_params_n", asked.params.n),
    ]
    arrival, first, last = (
        answer.statistics.get(f"{n}_time_ns", 0) for n in ("arrival", "first_token", "last_token")
    )
    if not first:
        return found
    last = max(first, last)
    found.append(("vllm:time_to_first_token_seconds", (first - arrival) * 1e-9))
    found.append(("vllm:e2e_request_latency_seconds", (last - arrival) * 1e-9))
    later = max(0, max((len(one.token_ids) for one in answer.outputs), default=0) - 1)
    gap = ("vllm:time_per_output_token_seconds", (last - first) * 1e-9 / max(1, later))
    return found + [gap] * later
