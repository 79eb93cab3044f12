"""Hands samples to Triton's metrics. One thread only: two on one metric end the server."""

from __future__ import annotations

import json

import triton_python_backend_utils as pb_utils

from manylora.wire.metrics import FAMILIES, STAMP, RequestMeter, engine_samples, iteration_log


class Exporter:
    def __init__(self, model, version):
        self._common = {"model": model, "version": version}
        self._meter = RequestMeter()
        self._families = {name: _family(name) for name in FAMILIES}
        self._metrics = {name: {} for name in FAMILIES}  # family -> labels -> metric
        self._logged = {}  # by the last line of the log, but for its time
        self._last = {}  # (family, labels) -> value of a gauge, or of a counter that comes as a total

    def update(self, stats):
        """Gauges and totals. A family of which a label set is gone is made anew without it."""
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
            # As upstream: the time is that of the numbers.
            if numbers != self._logged or "timestamp" not in dict(sample.labels).values():
                self._put(sample)
        if numbers != self._logged:
            pb_utils.Logger.log_verbose(json.dumps(log))
            self._logged = numbers

    def observe(self, lora, event):
        """A sequence that ended."""
        for sample in self._meter.samples(lora, event):
            self._put(sample)

    def _put(self, sample):
        family, metrics = FAMILIES[sample.family], self._metrics[sample.family]
        metric = metrics.get(sample.labels)
        if metric is None:
            buckets = {"buckets": list(family.buckets)} if family.buckets else {}
            labels = {**self._common, **dict(sample.labels)}
            metric = metrics[sample.labels] = self._families[sample.family].Metric(labels=labels, **buckets)
        if family.kind == "histogram":
            metric.observe(sample.value)
            return
        if sample.increment:
            metric.increment(sample.value)
            return
        key = (sample.family, sample.labels)
        last = self._last.get(key, 0)
        if sample.value == last:  # a call into the server for each, so only for news
            return
        if family.kind == "gauge":
            metric.set(sample.value)
        else:
            metric.increment(sample.value - last)
        self._last[key] = sample.value


def _family(name):
    family = FAMILIES[name]
    # Triton adds the class only when the model is made.
    kind = getattr(pb_utils.MetricFamily, family.kind.upper())
    return pb_utils.MetricFamily(name=name, description=family.help, kind=kind)
