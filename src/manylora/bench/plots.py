"""The report as plots: a PNG, or one HTML file with plots and text."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from manylora.bench.load import Record, Sample
from manylora.bench.report import TIERS
from manylora.bench.report_text import render
from manylora.errors import ConfigError

SUFFIXES = (".png", ".html")


def check_plot(path: Path) -> None:
    """Check before the run whether the plot can be written. Raises ConfigError."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"--plot must name a file ending in {' or '.join(SUFFIXES)}, got {path.name}")
    _figure()


def write_plot(
    path: Path, report: dict[str, Any], records: Sequence[Record], samples: Sequence[Sample]
) -> None:
    """samples: empty for a server, whose cache statistics are unknown."""
    figure = _figure()
    left, middle, right = figure.subplots(1, 3)
    if report["adapters"]["sweep"]:
        _sweep(left, report["adapters"]["sweep"])
    else:
        _answered(left, records)
    _latency(middle, records)
    _cache(right, records, samples)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    if path.suffix == ".png":
        path.write_bytes(picture.getvalue())
        return
    data = base64.b64encode(picture.getvalue()).decode()
    path.write_text(
        f'<!doctype html><meta charset="utf-8"><title>manylora bench</title>'
        f'<img alt="throughput, latency, cache" src="data:image/png;base64,{data}">'
        f"<pre>{html.escape(render(report))}</pre>",
        encoding="utf-8",
    )


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'manylora[bench]'") from error
    return Figure(figsize=(15, 4.5), layout="constrained")


def _sweep(axes: Any, sweep: Sequence[dict[str, Any]]) -> None:
    numbers = [entry["num_adapters"] for entry in sweep]
    axes.plot(numbers, [entry["system_output_throughput_tok_s"] for entry in sweep], marker="o")
    axes.set_xticks(numbers)
    axes.set(title="Throughput", xlabel="adapters", ylabel="output tokens / s")
    axes.set_ylim(bottom=0)


def _answered(axes: Any, records: Sequence[Record]) -> None:
    begin = min(record.started for record in records)
    done = sorted((r.finished - begin, r.answer.num_output_tokens) for r in records if r.answer is not None)
    tokens = [0, *accumulate(count for _, count in done)]
    axes.step([0.0, *(at for at, _ in done)], tokens, where="post")
    axes.set(title="Throughput", xlabel="s", ylabel="output tokens of ended requests")


def _latency(axes: Any, records: Sequence[Record]) -> None:
    done = [(record, record.answer) for record in records if record.answer is not None]
    curves = {
        "request": [record.finished - record.started for record, _ in done],
        "first token": [a.first_token - record.started for record, a in done if a.first_token is not None],
    }
    for name, values in curves.items():
        if values:
            ranks = [100 * (i + 1) / len(values) for i in range(len(values))]
            axes.plot(ranks, [1e3 * value for value in sorted(values)], label=name)
    axes.set(title="Latency", xlabel="percentile of requests", ylabel="ms")
    axes.set_ylim(bottom=0)
    axes.legend()


def _cache(axes: Any, records: Sequence[Record], samples: Sequence[Sample]) -> None:
    axes.set(title="Adapter cache", xlabel="s", ylabel="count since the start")
    begin = min(record.started for record in records)
    for tier, name in TIERS.items():
        found = [r for r in records if r.answer is not None and r.answer.adapter_tier == tier]
        times = sorted(record.finished - begin for record in found)
        if times:
            axes.step([0.0, *times], range(len(times) + 1), where="post", label=f"requests, {name}")
    if samples:
        before = samples[0][1].adapters.device_evictions
        counts = [stats.adapters.device_evictions - before for _, stats in samples]
        axes.plot([at - begin for at, _ in samples], counts, "--", label="evictions, device")
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
