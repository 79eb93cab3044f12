"""The metrics of the model `tensorrt_llm`, and its verbose log."""

from __future__ import annotations

import json
from collections.abc import Mapping

import triton_python_backend_utils as pb_utils

from manylora.doors.triton.metrics import (
    FAMILIES,
    GAUGES,
    STAMP,
    MetricWriter,
    RequestMeter,
    engine_samples,
    iteration_log,
)
from manylora.request import Event, LoraInput, LoraMix
from manylora.stats import EngineStats


class Exporter:
    """labels: on every metric. The rest as MetricWriter."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._meter = RequestMeter()
        self._writer = MetricWriter(pb_utils, FAMILIES, labels)
        self._logged: Mapping[str, float | str] = {}  # the last logged line, without its time

    def update(self, stats: EngineStats) -> None:
        samples = list(engine_samples(stats))
        for name in GAUGES:
            self._writer.keep_only(name, {one.labels for one in samples if one.family == name})
        log = iteration_log(samples)
        numbers = {key: value for key, value in log.items() if key != STAMP}
        for sample in samples:
            # As in TensorRT-LLM: the time is that of the numbers.
            if numbers != self._logged or sample.logged != STAMP:
                self._writer.put(sample)
        if numbers != self._logged:
            pb_utils.Logger.log_verbose(json.dumps(log))
            self._logged = numbers

    def observe(self, lora: LoraInput | LoraMix | None, event: Event) -> None:
        """Record a sequence that ended."""
        for sample in self._meter.samples(lora, event):
            self._writer.put(sample)
