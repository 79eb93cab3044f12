"""Passes samples to Triton's metrics. Use on one thread only: two threads on one metric crash the server."""

from __future__ import annotations

import json
from collections.abc import Mapping

import triton_python_backend_utils as pb_utils

from manylora.doors.triton.metrics import FAMILIES, STAMP, RequestMeter, Sample, engine_samples, iteration_log
from manylora.request import Event, LoraInput, LoraMix
from manylora.stats import EngineStats

Labels = tuple[tuple[str, str], ...]


class Exporter:
    def __init__(self, model: str, version: str) -> None:
        self._common = {"model": model, "version": version}
        self._meter = RequestMeter()
        self._families = {name: _family(name) for name in FAMILIES}
        self._metrics: dict[str, dict[Labels, pb_utils.Metric]] = {name: {} for name in FAMILIES}
        self._logged: Mapping[str, float | str] = {}  # the last logged line, without its time
        # (family, labels) -> value of a gauge, or of a counter that is reported as a total
        self._last: dict[tuple[str, Labels], float] = {}

    def update(self, stats: EngineStats) -> None:
        """Update gauges and totals. A family is created again without a label set that is gone."""
        samples = list(engine_samples(stats))
        for name, family in FAMILIES.items():
            if family.kind == "gauge":
                now = {sample.labels for sample in samples if sample.family == name}
                if self._metrics[name].keys() - now:
                    for labels in self._metrics[name]:
                        self._last.pop((name, labels), None)
                    self._metrics[name].clear()
                    del self._families[name]  # Triton drops the series with the family, not with the metric
                    self._families[name] = _family(name)
        log = iteration_log(samples)
        numbers = {key: value for key, value in log.items() if key != STAMP}
        for sample in samples:
            # As in TensorRT-LLM: the time is that of the numbers.
            if numbers != self._logged or "timestamp" not in dict(sample.labels).values():
                self._put(sample)
        if numbers != self._logged:
            pb_utils.Logger.log_verbose(json.dumps(log))
            self._logged = numbers

    def observe(self, lora: LoraInput | LoraMix | None, event: Event) -> None:
        """Record a sequence that ended."""
        for sample in self._meter.samples(lora, event):
            self._put(sample)

    def _put(self, sample: Sample) -> None:
        family, metrics = FAMILIES[sample.family], self._metrics[sample.family]
        metric = metrics.get(sample.labels)
        if metric is None:
            buckets = {"buckets": list(family.buckets)} if family.buckets else {}
            labels = {**self._common, **dict(sample.labels)}
            metric = self._families[sample.family].Metric(labels=labels, **buckets)
            metrics[sample.labels] = metric
        if family.kind == "histogram":
            metric.observe(sample.value)
            return
        if sample.increment:
            metric.increment(sample.value)
            return
        key = (sample.family, sample.labels)
        last = self._last.get(key, 0)
        if sample.value == last:  # each update calls the server, so skip unchanged values
            return
        if family.kind == "gauge":
            metric.set(sample.value)
        else:
            metric.increment(sample.value - last)
        self._last[key] = sample.value


def _family(name: str) -> pb_utils.MetricFamily:
    family = FAMILIES[name]
    # Triton adds the class only when the model is created.
    kind = getattr(pb_utils.MetricFamily, family.kind.upper())
    return pb_utils.MetricFamily(name=name, description=family.help, kind=kind)
