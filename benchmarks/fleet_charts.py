#!/usr/bin/env python3
"""The chart of docs/scaling.md from what fleet_simulation.py wrote with --json. Needs matplotlib.

fleet_charts.py docs/images found.json more.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from charts import GREY, MARK, OURS, STYLE

COLOURS = {
    "random": "#e39b3a",
    "round robin": "#9467bd",
    "plain affinity": "#4c9f70",
    "manylora": OURS,
    "bound": GREY,
}
# Study, what is on the x axis, figure on the y axis, its factor, words for both.
PANELS = (
    (
        "adapters",
        "adapters",
        "loads",
        1.0,
        "adapters, 10 servers with room for 40 each",
        "cold loads of 1000",
    ),
    ("load", "rate", "ttft_p99", 1000.0, "requests a second for each server", "P99 time to first token, ms"),
    ("large", "replicas", "loads", 1.0, "servers; 100 adapters and room for 4 each", "cold loads of 1000"),
    ("large", "replicas", "router_s", 1e6, "servers", "processor time of one choice, µs"),
)


def draw(cases: list[dict[str, Any]], folder: Path) -> list[Path]:
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update(STYLE)
    figure = Figure(figsize=(9, 7), layout="constrained")
    handles: dict[str, Any] = {}
    for axes, (study, key, value, factor, x_words, y_words) in zip(
        figure.subplots(2, 2).flat, PANELS, strict=True
    ):
        some = [case for case in cases if study in (case["study"],)]
        some.sort(key=lambda case: case["fleet"][key])
        names = [row["policy"] for row in some[0]["found"]] if some else []
        for name in names:
            if value == "router_s" and name != "manylora":
                continue
            points = [
                (case["fleet"][key], factor * row[value])
                for case in some
                for row in case["found"]
                if row["policy"] == name
            ]
            style = "--" if name == "bound" else "-"
            (handles[name],) = axes.plot(*zip(*points, strict=True), style, marker="o", color=COLOURS[name])
        if key != "rate":
            axes.set_xscale("log")
        axes.set(xlabel=x_words, ylabel=y_words)
        axes.set_ylim(bottom=0)
    figure.legend(
        handles=list(handles.values()), labels=list(handles), loc="outside lower left", ncols=5, frameon=False
    )
    figure.suptitle("Fleets in simulated time", x=0.01, ha="left", fontsize=12, weight="bold", color=MARK)
    made = []
    for kind in ("png", "svg"):
        made.append(folder / f"scaling.{kind}")
        figure.savefig(made[-1], dpi=100, metadata={"Date": None} if kind == "svg" else None)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    options = parser.parse_args()
    cases = [case for path in options.files for case in json.loads(path.read_text(encoding="utf-8"))["cases"]]
    print(*draw(cases, options.folder))


if __name__ == "__main__":
    main()
