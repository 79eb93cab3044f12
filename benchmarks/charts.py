#!/usr/bin/env python3
"""Draws charts from the JSON files of benchmarks/engine.py and benchmarks/peers.py, as PNG and SVG.

    charts.py --engine engine.json --peers peers.json docs/images

Writes two kinds of charts, whose names end in the processor's instruction set (avx2, avx-512, neon):

    engine_MODEL_avx2  tokens per second with adapters, and what the machine's bandwidth and arithmetic allow
    peers_MODEL_avx2   manylora and other engines at 1, 4, 16 and 32 concurrent requests

Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from peers.rows import Found, Row, read
from peers.tables import NAMES, case_words

OURS, GREY, MARK, TEXT = "#1f5fbf", "#8a93a0", "#c2410c", "#1b1f24"
PEERS = {"openvino": "#e39b3a", "llama.cpp": "#4c9f70", "vllm": "#9467bd", "transformers": "#8c8c8c"}
MODELS = {"small": "Llama of 125 million parameters", "mid": "Qwen2 of 387 million parameters"}
DTYPES = {"bfloat16": "bfloat16", "float32": "float32", "int8": "8-bit weights", "int4": "4-bit weights"}
ENGINE_LIMIT = "limit: the base model's speed, less the least time\nthat this machine needs for the adapters"
LIMIT = "limit of this machine's\nmemory bandwidth and arithmetic"
CHART_CASES = ("base", "r8qkv-8", "r16all-8", "r16all-32")
STYLE = {
    "font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": GREY,
    "text.color": TEXT, "axes.labelcolor": TEXT, "xtick.color": TEXT, "ytick.color": TEXT,
    "axes.titlelocation": "left", "axes.titlesize": 11.5, "svg.hashsalt": "manylora",
    "figure.facecolor": "white",
}  # fmt: skip


def draw_engine(found: dict[str, Any], folder: Path) -> list[Path]:
    """Draw one chart per model, from its first setting. found: the benchmark's JSON."""
    made: list[Path] = []
    seen: set[str] = set()
    for setting in found["settings"]:
        if setting["model"] not in seen:
            seen.add(setting["model"])
            made += _engine(setting, found["machine"], folder)
    return made


def _engine(setting: dict[str, Any], machine: dict[str, Any], folder: Path) -> list[Path]:
    cases = setting["cases"]
    base = cases["base"]["tokens_per_s"]
    figure, grid = _figure(0.38 * len(cases) + 2.3)
    axes = grid[0][0]
    names = ["base model alone" if name == "base" else case_words(name) for name in cases]
    colors = [GREY, *[OURS] * (len(cases) - 1)]
    for place, (case, color) in enumerate(zip(cases.values(), colors, strict=True)):
        rate, limit = case["tokens_per_s"], base * case["limit"]
        axes.barh(place, rate, 0.66, color=color)
        words = f"{rate:.0f}" if place == 0 else f"{rate:.0f} = {case['of_base']:.0%}"
        axes.text(rate - base / 80, place, words, ha="right", va="center", color="white", fontsize=11)
        if place:
            axes.vlines(limit, place - 0.36, place + 0.36, MARK, lw=2)
    axes.invert_yaxis()
    axes.set(xlabel="output tokens per second, and share of the base model's", xlim=(0, base * 1.05))
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    legend = [_patch(GREY, "base model alone"), _patch(OURS, "manylora with adapters"), _mark(ENGINE_LIMIT)]
    title = _title(setting["model"], setting["dtype"], f", {setting['at_once']} concurrent requests")
    words = f"{_where(machine)}; {setting['prompt']} tokens in, 64 out"
    return _save(figure, title, legend, _name("engine", setting["model"], machine), words, folder)


def draw_peers(found: Found, folder: Path) -> list[Path]:
    """Draw one chart per model, in bfloat16 if it was measured, otherwise in the first dtype."""
    made: list[Path] = []
    for model in dict.fromkeys(row.model for row in found.good()):
        rows = [row for row in found.good() if row.model == model]
        dtype = "bfloat16" if any(row.dtype == "bfloat16" for row in rows) else rows[0].dtype
        made += _peers([row for row in rows if row.dtype == dtype], found.machine, folder)
    return made


def _peers(rows: list[Row], machine: dict[str, Any], folder: Path) -> list[Path]:
    """One panel per case, with a group of bars per number of concurrent requests."""
    cases = [name for name in CHART_CASES if any(row.case == name for row in rows)]
    columns = min(2, len(cases))
    lines = -(-len(cases) // columns)
    figure, grid = _figure(2.7 * lines + 1.5, lines, columns)
    top = 1.06 * max(max(row.rate("ours"), row.rate("peer"), row.limit or 0) for row in rows)
    for axes, name in zip(grid.flat, cases, strict=False):
        _panel(axes, [row for row in rows if row.case == name], top)
        axes.set_title(case_words(name))
    for axes in list(grid.flat)[len(cases) :]:
        axes.remove()
    figure.supylabel("output tokens per second", fontsize=11)
    peers = list(dict.fromkeys(row.peer for row in rows))
    legend = [_patch(OURS, "manylora"), *(_patch(PEERS[peer], NAMES[peer]) for peer in peers)]
    if any(row.limit for row in rows):
        legend.append(_mark(LIMIT))
    title = _title(rows[0].model, rows[0].dtype, ", compared with other engines")
    words = f"{_where(machine)}; 64 tokens in, 64 out. ×: ours / the fastest other engine"
    return _save(figure, title, legend, _name("peers", rows[0].model, machine), words, folder)


def _panel(axes: Any, rows: list[Row], top: float) -> None:
    """Draw one case. manylora was measured once beside each peer; the bar shows the run beside the first."""
    numbers = sorted({row.at_once for row in rows})
    words = []
    for x, number in enumerate(numbers):
        some = [row for row in rows if row.at_once == number]
        width = 0.82 / (1 + len(some))
        bars = [(some[0].rate("ours"), OURS), *((row.rate("peer"), PEERS[row.peer]) for row in some)]
        for place, (rate, color) in enumerate(bars):
            left = x + (place - len(some) / 2) * width
            axes.bar(left, rate, width * 0.94, color=color)
            inside = rate > top / 14
            axes.text(
                left, rate - top / 60 if inside else rate + top / 60, f"{rate:.0f}", ha="center",
                va="top" if inside else "bottom", fontsize=9.5,
                color="white" if inside and color == OURS else TEXT,
            )  # fmt: skip
        if some[0].limit:
            axes.hlines(some[0].limit, x - 0.44, x + 0.44, MARK, lw=2)
        words.append(f"{number} at once\n{min(row.ratio() for row in some):.2f} ×")
    axes.set(ylim=(0, top))
    axes.set_xticks(range(len(numbers)), words)
    axes.tick_params(axis="x", length=0)


def _figure(height: float, lines: int = 1, columns: int = 1) -> tuple[Any, Any]:
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update(STYLE)
    figure = Figure(figsize=(9, height), layout="constrained")
    return figure, figure.subplots(lines, columns, squeeze=False)


def _title(model: str, dtype: str, more: str) -> str:
    return f"{MODELS[model]}, {DTYPES[dtype]}{more}"


def _name(kind: str, model: str, machine: dict[str, Any]) -> str:
    """The file's stem. A chart replaces that of another processor with the same instruction set."""
    first, *more = machine["instructions"].lower().split(", ")
    return "_".join([kind, model, first, *(name for name in more if name in ("bf16", "amx"))])


def _where(machine: dict[str, Any]) -> str:
    return f"{machine['short']}; {machine['date'][:10]}"


def _patch(color: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=color, label=label)


def _mark(label: str) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], color=MARK, lw=2.5, label=label)


def _save(figure: Any, title: str, legend: list[Any], name: str, words: str, folder: Path) -> list[Path]:
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, weight="bold")
    box = figure.legend(
        handles=legend, loc="outside lower left", ncols=len(legend), frameon=False, fontsize=10.5,
        title=words, title_fontsize=10, alignment="left",
    )  # fmt: skip
    box.get_title().set_color("#57606a")
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for kind in ("png", "svg"):
        path = folder / f"{name}.{kind}"
        figure.savefig(path, dpi=100, metadata={"Date": None} if kind == "svg" else None)
        made.append(path)
    return made


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("folder", type=Path, help="where PNG and SVG files are written")
    parser.add_argument("--engine", type=Path, metavar="FILE", help="from engine.py --json")
    parser.add_argument("--peers", type=Path, metavar="FILE", help="from peers.py --json")
    options = parser.parse_args()
    if not (options.engine or options.peers):
        parser.error("--engine or --peers must name a file")
    if options.engine:
        print(*draw_engine(json.loads(options.engine.read_text(encoding="utf-8")), options.folder))
    if options.peers:
        print(*draw_peers(read(options.peers), options.folder))


if __name__ == "__main__":
    main()
