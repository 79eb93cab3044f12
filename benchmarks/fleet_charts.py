#!/usr/bin/env python3
"""Draws the chart of docs/scaling.md from the JSON files of fleet_simulation.py. Needs matplotlib.

    fleet_charts.py docs/images found.json more.json

Shows cold loads per 1000 requests and the P99 time to first token, for each case and policy.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from charts import GREY, OURS, STYLE

COLOURS = {
    "random": "#e39b3a",
    "round robin": "#9467bd",
    "plain affinity": "#4c9f70",
    "manylora": OURS,
    "bound": GREY,
}
# Key of the figure, its factor, axis label, whether the axis is logarithmic.
PANELS = (
    ("loads", 1.0, "cold loads per 1000 requests", False),
    ("ttft_p99", 1000.0, "P99 time to first token, ms", True),
)


def words(fleet: dict[str, Any]) -> str:
    """The label of a case."""
    more = [f"{fleet['replicas']} servers", f"{fleet['adapters']:,} adapters", f"{fleet['rate']:g} /s each"]
    more += ["equal popularity"] if not fleet["zipf"] else []
    more += ["popularity shifts"] if fleet["shift_s"] else []
    more += ["bursts"] if fleet["burst"] > 1 else []
    return "\n".join([", ".join(more[:2]), ", ".join(more[2:])])


def draw(cases: list[dict[str, Any]], folder: Path) -> list[Path]:
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update(STYLE)
    figure = Figure(figsize=(9, 0.95 * len(cases) + 1.2), layout="constrained")
    grid = figure.subplots(1, 2, sharey=True)
    bars: dict[str, Any] = {}
    for axes, (value, factor, label, logarithmic) in zip(grid, PANELS, strict=True):
        for place, case in enumerate(cases):
            height = 0.8 / len(case["found"])
            for number, row in enumerate(case["found"]):
                y = place - 0.4 + (number + 0.5) * height
                color = COLOURS[row["policy"]]
                bars[row["policy"]] = axes.barh(y, factor * row[value], 0.9 * height, color=color)
        axes.set_yticks(range(len(cases)), [words(case["fleet"]) for case in cases])
        axes.set(xlabel=label, xscale="log" if logarithmic else "linear")
    grid[0].invert_yaxis()
    figure.legend(list(bars.values()), list(bars), loc="outside lower left", ncols=5, frameon=False)
    figure.suptitle("Fleets in simulated time", x=0.01, ha="left", fontsize=12, weight="bold")
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
