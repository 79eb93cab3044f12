"""The figure of benchmarks/engine.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw(settings: list[dict[str, Any]], folder: Path) -> list[Path]:
    """A PNG and an SVG for each model in `folder`: tokens per second, and ratios to the base.

    settings: as in the benchmark's JSON."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    made: list[Path] = []
    for model in dict.fromkeys(setting["model"] for setting in settings):
        some = [setting for setting in settings if setting["model"] == model]
        names = list(dict.fromkeys(name for setting in some for name in setting["cases"]))
        figure = Figure(figsize=(11, 0.45 * len(names) * (1 + 0.25 * len(some)) + 1.5), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        height = 0.8 / len(some)
        for n, setting in enumerate(some):
            label = f"{setting['dtype']}, prompts of {setting['prompt']}"
            places = [names.index(name) + (n - (len(some) - 1) / 2) * height for name in setting["cases"]]
            cases = setting["cases"].values()
            left.barh(places, [case["tokens_per_s"] for case in cases], height, label=label)
            right.barh(places, [case["of_base"] for case in cases], height)
            right.plot([case["limit"] for case in cases], places, "k|", markersize=60 * height)
        left.set(title="Output tokens per second", yticks=range(len(names)), yticklabels=names)
        right.set(title="Of the base model; the line is the machine's limit")
        left.invert_yaxis()
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2)
        for kind in ("png", "svg"):
            path = folder / f"engine_{model}.{kind}"
            figure.savefig(path, dpi=110, metadata={"Date": None} if kind == "svg" else None)
            made.append(path)
    return made
