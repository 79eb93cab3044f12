"""Prometheus metrics of the engine as plain data: TensorRT-LLM's families, and ours for adapters.
VllmMetrics: the metrics of vllm_backend, with vLLM's names. Both are written to Triton by MetricWriter.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from manylora.request import Event, FinishReason, LoraInput, LoraMix
from manylora.stats import EngineStats
from manylora.system.lifeline import is_starting

if TYPE_CHECKING:
    from manylora.doors.triton.prompts import Answer, PromptRequest

TOKEN_BUCKETS = (10.0, 50.0, 100.0, 500.0, 1000.0)
SECONDS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
REQUESTS, MEMORY = "nv_trt_llm_request_metrics", "nv_trt_llm_runtime_memory_metrics"
KV_BLOCKS, BATCHER = "nv_trt_llm_kv_cache_block_metrics", "nv_trt_llm_inflight_batcher_metrics"
GENERAL = "nv_trt_llm_general_metrics"
LORA_INFO = "vllm:lora_requests_info"
RESIDENT, LOAD_SECONDS = "vllm:lora_adapter_loaded", "vllm:lora_adapter_load_seconds"


@dataclass(frozen=True)
class MetricFamily:
    """kind: gauge, counter (values grow), histogram (values are observed)."""

    help: str
    kind: str = "gauge"
    buckets: tuple[float, ...] = ()


GAUGES = {
    REQUESTS: "TRT LLM request metrics",
    MEMORY: "TRT LLM runtime memory metrics",
    KV_BLOCKS: "TRT LLM KV cache block metrics",
    BATCHER: "TRT LLM inflight_batcher-specific metrics",
    GENERAL: "General TRT LLM metrics",
    LORA_INFO: "Adapters on the device and waited for; the value is when it was written",
    # Names of vLLM's pull request 54830, which llm-d's scorer reads.
    RESIDENT: "1 for each adapter and level of the cache that holds it",
    "vllm:num_gpu_loaded_lora_adapters": "Adapters on the device level of the cache",
    "vllm:num_cpu_loaded_lora_adapters": "Adapters on the host level of the cache",
    "vllm:max_gpu_lora_adapters": "Adapters of the largest rank with every module that fit the device level",
    "manylora_lora_cache_pages": "Pages of the LoRA cache by level and state",
    "manylora_lora_cache_page_bytes": "Bytes of one page of the LoRA cache",
    "manylora_lora_cache_adapters": "Adapters in the LoRA cache by level",
    "manylora_adapter_resident_bytes": "Bytes of an adapter's pages by level",
    "manylora_kv_store_bytes": "Bytes of KV blocks in host memory and on disk",
}
COUNTERS = {
    "manylora_lora_cache_evictions_total": "Adapters evicted from the LoRA cache by level",
    "manylora_inert_adapter_loads_total": "Adapters that came to the LoRA cache and change nothing, such as "
    "untrained ones",
    "manylora_lora_cache_loads_total": "Adapters written to the LoRA cache by level",
    "manylora_lora_version_changes_total": "Names and task ids that came to mean another content",
    "manylora_lora_sequence_swaps_total": "Sequences under way that went on under a newer version of their "
    "adapter",
    "manylora_adapter_requests_total": "Requests answered by adapter and finish reason",
    "manylora_pooled_requests_total": "Requests answered with an embedding, labels or a score in place of "
    "text, by adapter",
    "manylora_adapter_tokens_total": "Tokens by adapter, of prompts and of outputs",
    "manylora_activated_tokens_total": "Tokens of activated LoRAs' requests: before one acts, of these "
    "shared, and where it acts",
    "manylora_adapter_cold_loads_total": "Requests that found their adapter beneath the device, by adapter "
    "and tier",
    "manylora_kv_store_hits_total": "KV blocks that were copied back instead of computed, by level",
    "manylora_kv_store_evictions_total": "KV blocks evicted from host memory and from disk",
    "manylora_kv_store_damaged_total": "Files of KV blocks that were damaged, and deleted",
    "manylora_draft_tokens_total": "Tokens of drafts, and those of them accepted",
    "manylora_cuda_graphs_recorded_total": "CUDA graphs that were recorded",
    "manylora_decode_steps_total": "Decode steps on a GPU by how they were launched",
}
HISTOGRAMS = {
    "nv_llm_input_token_len": ("TRT LLM response metrics", TOKEN_BUCKETS),
    "nv_llm_output_token_len": ("TRT LLM response metrics", TOKEN_BUCKETS),
    "manylora_adapter_ttft_seconds": ("Time to first token by adapter", SECONDS_BUCKETS),
    "manylora_adapter_queue_seconds": (
        "Time that a request waited before its first step, by adapter", SECONDS_BUCKETS
    ),
    LOAD_SECONDS: ("Time to load an adapter that was not on the device, by where it was", SECONDS_BUCKETS),
}  # fmt: skip
FAMILIES = {
    **{name: MetricFamily(text) for name, text in GAUGES.items()},
    **{name: MetricFamily(text, "counter") for name, text in COUNTERS.items()},
    **{name: MetricFamily(text, "histogram", buckets) for name, (text, buckets) in HISTOGRAMS.items()},
}
MAX_ADAPTERS = 100  # label values; further adapters are counted together
STAMP = "Timestamp"
BASE, OTHER = "base", "other"


@dataclass(frozen=True)
class Sample:
    """increment: add to a counter; else it is a value. logged: its name in TensorRT-LLM's log, or none."""

    family: str
    labels: tuple[tuple[str, str], ...]
    value: float
    increment: bool = False
    logged: str = ""


def engine_samples(stats: EngineStats) -> Iterator[Sample]:
    for family, label, gauges in _upstream(stats):
        for name, logged, value in gauges:
            yield Sample(family, ((label, name),), value, logged=logged)
    a = stats.adapters
    host = a.host_pages, a.host_pages_free, a.host_adapters, a.host_evictions, a.host_stores
    device = a.device_pages, a.device_pages_free, a.device_adapters, a.device_evictions, a.device_loads
    for level, (pages, free, adapters, evictions, loads) in (("host", host), ("device", device)):
        where = ("level", level)
        yield Sample("manylora_lora_cache_pages", (where, ("state", "used")), pages - free)
        yield Sample("manylora_lora_cache_pages", (where, ("state", "free")), free)
        yield Sample("manylora_lora_cache_adapters", (where,), adapters)
        yield Sample("manylora_lora_cache_evictions_total", (where,), evictions)
        yield Sample("manylora_lora_cache_loads_total", (where,), loads)
    if stats.draft_tokens:
        for state, count in (("drafted", stats.draft_tokens), ("accepted", stats.accepted_draft_tokens)):
            yield Sample("manylora_draft_tokens_total", (("state", state),), count)
    yield Sample("manylora_lora_cache_page_bytes", (), a.page_bytes)
    yield Sample("manylora_inert_adapter_loads_total", (), a.inert_loads)
    yield Sample("manylora_lora_version_changes_total", (), a.version_changes)
    yield Sample("manylora_lora_sequence_swaps_total", (), a.sequence_swaps)
    for one in a.residents[:MAX_ADAPTERS]:
        adapter = ("adapter", one.name)
        size = one.pages * a.page_bytes
        facts = ("pinned", str(one.pinned).lower()), ("rank", str(one.rank))
        for level, vllm in (("host", "cpu"), *((("device", "gpu"),) if one.on_device else ())):
            yield Sample("manylora_adapter_resident_bytes", (adapter, ("level", level)), size)
            yield Sample(RESIDENT, (("adapter_name", one.name), ("level", vllm), *facts), 1)
    kv = stats.kv_store
    if kv is not None:
        in_host = kv.host_bytes, kv.host_hits, kv.host_evictions
        on_disk = kv.disk_bytes, kv.disk_hits, kv.disk_evictions
        for level, (size, hits, evictions) in (("host", in_host), ("disk", on_disk)):
            where = ("level", level)
            yield Sample("manylora_kv_store_bytes", (where,), size)
            yield Sample("manylora_kv_store_hits_total", (where,), hits)
            yield Sample("manylora_kv_store_evictions_total", (where,), evictions)
        yield Sample("manylora_kv_store_damaged_total", (), kv.damaged)
    yield Sample("vllm:num_gpu_loaded_lora_adapters", (), a.device_adapters)
    yield Sample("vllm:num_cpu_loaded_lora_adapters", (), a.host_adapters)
    yield Sample("vllm:max_gpu_lora_adapters", (), a.max_device_adapters)
    if stats.on_gpu:
        graphs = stats.graphs
        yield Sample("manylora_cuda_graphs_recorded_total", (), graphs.recorded)
        yield Sample("manylora_decode_steps_total", (("launch", "graph"),), graphs.replayed)
        yield Sample("manylora_decode_steps_total", (("launch", "plain"),), graphs.plain)
    # For endpoint pickers of the Kubernetes Gateway API: adapters on the device, and adapters waited for.
    labels = (
        ("max_lora", str(max(1, a.max_device_adapters))),
        ("running_lora_adapters", ",".join(one.name for one in a.residents if one.on_device)),
        ("waiting_lora_adapters", ",".join(stats.waiting_adapters)),
    )
    yield Sample(LORA_INFO, labels, time.time())


def iteration_log(samples: Iterable[Sample]) -> dict[str, float | str]:
    """The content of a line of TensorRT-LLM's verbose log: the gauges of its families, under other names."""
    found: dict[str, float | str] = {one.logged: one.value for one in samples if one.logged}
    when = datetime.fromtimestamp(float(found[STAMP]) / 1e6, timezone.utc)
    return {**found, STAMP: when.strftime("%m-%d-%Y %H:%M:%S.%f")}


class RequestMeter:
    """Samples of finished sequences, but for the launcher's trial request. There are at most MAX_ADAPTERS
    labels: the first adapters with an answer have their own, the others are OTHER. An adapter whose requests
    all failed has none, because clients can send any name.
    """

    def __init__(self) -> None:
        self._names = {BASE, OTHER}
        self._starting = True

    def samples(
        self, lora: LoraInput | LoraMix | None, event: Event, waited_s: float = 0.0, read_s: float = 0.0
    ) -> Iterator[Sample]:
        """waited_s: before the engine got it; it counts as queueing time and towards the first token. read_s:
        of that, for its adapter to be read.
        """
        self._starting = self._starting and is_starting()
        if self._starting:
            return
        members = lora.members if lora is not None else ()
        names = [one.name or str(one.task_id) for one, _ in members] or [BASE]
        known = []
        for name in dict.fromkeys(names):
            unproven = event.finish_reason is FinishReason.ERROR or len(self._names) >= MAX_ADAPTERS
            known.append(OTHER if name not in self._names and unproven else name)
            self._names.add(known[-1])
        metrics = event.metrics
        reason = event.finish_reason.value if event.finish_reason else ""
        adapters = [("adapter", name) for name in dict.fromkeys(known)]
        for adapter in adapters:
            yield Sample("manylora_adapter_requests_total", (adapter, ("finish_reason", reason)), 1, True)
            if event.pooled is not None:
                yield Sample("manylora_pooled_requests_total", (adapter,), 1, True)
        if metrics is None or event.finish_reason is FinishReason.ERROR:
            return
        prompt, output = metrics.prompt_tokens, metrics.output_tokens
        yield Sample("nv_llm_input_token_len", (("response_metric_type", "total_input_tokens"),), prompt)
        yield Sample("nv_llm_output_token_len", (("response_metric_type", "total_output_tokens"),), output)
        if metrics.adapter_load_ns:
            tier = ("tier", metrics.adapter_tier)
            yield Sample(LOAD_SECONDS, (tier,), read_s + metrics.adapter_load_ns / 1e9)
        for adapter in adapters:
            yield Sample("manylora_adapter_tokens_total", (adapter, ("kind", "prompt")), prompt, True)
            yield Sample("manylora_adapter_tokens_total", (adapter, ("kind", "output")), output, True)
            if metrics.activated is not None:
                for kind in ("before", "shared", "acted"):
                    count = getattr(metrics.activated, kind)
                    yield Sample("manylora_activated_tokens_total", (adapter, ("kind", kind)), count, True)
            if metrics.first_scheduled_ns or waited_s:
                queued_ns = max(0, metrics.first_scheduled_ns - metrics.arrival_ns)
                yield Sample("manylora_adapter_queue_seconds", (adapter,), waited_s + queued_ns / 1e9)
            if metrics.first_token_ns:
                seconds = waited_s + (metrics.first_token_ns - metrics.arrival_ns) / 1e9
                yield Sample("manylora_adapter_ttft_seconds", (adapter,), seconds)
            if metrics.adapter_tier not in ("", "device"):
                tier = ("tier", metrics.adapter_tier)
                yield Sample("manylora_adapter_cold_loads_total", (adapter, tier), 1, True)


def _upstream(stats: EngineStats) -> Iterator[tuple[str, str, list[tuple[str, str, float]]]]:
    """Family, name of its label, and its gauges: label, name in the log, value."""
    active = stats.running + stats.waiting
    yield REQUESTS, "request_type", [
        ("active", "Active Request Count", active),
        ("max", "Max Request Count", stats.max_batch_size),
        ("scheduled", "Scheduled Requests", stats.scheduled),
        ("context", "Context Requests", stats.context_requests),
        ("waiting", "Waiting Requests", max(0, active - stats.scheduled)),
    ]  # fmt: skip
    a = stats.adapters
    engine_bytes, host_bytes = stats.weight_bytes + stats.kv_bytes, a.host_pages * a.page_bytes
    host_bytes += 0 if stats.kv_store is None else stats.kv_store.host_bytes
    if stats.on_gpu:  # on a CPU the device level only limits pages in use and has no memory
        engine_bytes += a.device_pages * a.page_bytes
    yield MEMORY, "memory_type", [
        ("cpu", "Runtime CPU Memory Usage", 0 if stats.on_gpu else engine_bytes + host_bytes),
        ("gpu", "Runtime GPU Memory Usage", engine_bytes if stats.on_gpu else 0),
        ("pinned", "Runtime Pinned Memory Usage", host_bytes if stats.on_gpu else 0),
    ]  # fmt: skip
    used = stats.kv_blocks - stats.kv_blocks_free
    reused = stats.kv_tokens_reused // max(1, stats.tokens_per_block)
    yield KV_BLOCKS, "kv_cache_block_type", [
        ("max", "Max KV cache blocks", stats.kv_blocks),
        ("free", "Free KV cache blocks", stats.kv_blocks_free),
        ("used", "Used KV cache blocks", used),
        ("tokens_per", "Tokens per KV cache block", stats.tokens_per_block),
        ("reused", "Reused KV cache blocks", reused),
        ("fraction", "Fraction used KV cache blocks", used / max(1, stats.kv_blocks)),
    ]  # fmt: skip
    yield BATCHER, "inflight_batcher_specific_metric", [
        ("total_context_tokens", "Total Context Tokens", stats.context_tokens),
        ("generation_requests", "Generation Requests", stats.generation_requests),
        ("micro_batch_id", "MicroBatch ID", 0),
        ("paused_requests", "Paused Requests", stats.preemptions),
    ]  # fmt: skip
    yield GENERAL, "general_type", [
        ("timestamp", STAMP, int(time.time() * 1e6)),
        ("iteration_counter", "Iteration Counter", stats.steps),
    ]  # fmt: skip


FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
NEXT_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
WHOLE = (1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
SAMPLES = (1.0, 2.0, 5.0, 10.0, 20.0)


def families(longest: int) -> dict[str, MetricFamily]:
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


Labels = tuple[tuple[str, str], ...]


class MetricWriter:
    """Passes samples to Triton. One thread only: two threads on one metric crash the server.

    pb_utils: triton_python_backend_utils. labels: on every metric. It must not outlive the model's
    `finalize`: a metric that is released later crashes the process.
    """

    def __init__(
        self, pb_utils: Any, families: Mapping[str, MetricFamily], labels: Mapping[str, str]
    ) -> None:
        self._pb_utils, self._kinds, self._common = pb_utils, families, dict(labels)
        self._families = {name: self._family(name) for name in families}
        self._metrics: dict[str, dict[Labels, Any]] = {name: {} for name in families}
        # (family, labels) -> value of a gauge, or of a counter that is reported as a total
        self._last: dict[tuple[str, Labels], float] = {}

    def put(self, sample: Sample) -> None:
        family, metric = self._kinds[sample.family], self.metric(sample.family, sample.labels)
        key = (sample.family, sample.labels)
        last = self._last.get(key, 0)
        if family.kind == "histogram":
            metric.observe(sample.value)
        elif sample.increment:
            metric.increment(sample.value)
        elif sample.value != last:  # each update calls the server, so skip unchanged values
            if family.kind == "gauge":
                metric.set(sample.value)
            else:
                metric.increment(sample.value - last)
            self._last[key] = sample.value

    def metric(self, name: str, labels: Labels = ()) -> Any:
        found = self._metrics[name].get(labels)
        if found is None:
            buckets = self._kinds[name].buckets
            more = {"buckets": list(buckets)} if buckets else {}
            found = self._families[name].Metric(labels={**self._common, **dict(labels)}, **more)
            self._metrics[name][labels] = found
        return found

    def keep_only(self, name: str, labels: Set[Labels]) -> None:
        """Create the family again if it has a label set that is gone."""
        if self._metrics[name].keys() - labels:
            for gone in self._metrics[name]:
                self._last.pop((name, gone), None)
            self._metrics[name].clear()
            del self._families[name]  # Triton drops the series with the family, not with the metric
            self._families[name] = self._family(name)

    def _family(self, name: str) -> Any:
        # Triton adds the class only when the model is created.
        kinds, family = self._pb_utils.MetricFamily, self._kinds[name]
        return kinds(name=name, description=family.help, kind=getattr(kinds, family.kind.upper()))


class VllmMetrics:
    """longest: tokens of a sequence. pb_utils, labels: of MetricWriter."""

    def __init__(self, pb_utils: Any, labels: Mapping[str, str], longest: int) -> None:
        self._finished: queue.SimpleQueue[tuple[PromptRequest, Answer]] = queue.SimpleQueue()
        known = families(longest)
        self._writer = MetricWriter(pb_utils, known, labels)
        for name in known:  # shown before the first request
            self._writer.metric(name)

    def observe(self, asked: PromptRequest, answer: Answer) -> None:
        """Record a finished answer, with its statistics. Thread-safe."""
        self._finished.put((asked, answer))

    def write(self) -> None:
        """Write what was recorded. One thread only."""
        while not self._finished.empty():
            for name, value in samples(*self._finished.get()):
                self._writer.put(Sample(name, (), value, increment=True))


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
