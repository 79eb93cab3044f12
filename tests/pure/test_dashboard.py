"""Protects the Grafana dashboard: it loads, panels do not overlap, and it names only metrics that exist."""

from __future__ import annotations

import json
import re

from dashboard import BOARD

from manylora.doors.triton.metrics import FAMILIES

WORDS = {"sum", "by", "rate", "histogram_quantile", "label_values", "le", "model"}


def test_the_dashboard_names_only_metrics_that_exist() -> None:
    board = json.loads(BOARD.read_text())
    known = set(FAMILIES)
    for name, family in FAMILIES.items():
        if family.kind == "histogram":
            known |= {f"{name}_bucket", f"{name}_sum", f"{name}_count"}
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    expressions += [item["query"] for item in board["templating"]["list"] if item["type"] == "query"]
    assert len(expressions) > 12
    for expression in expressions:
        bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|by \([^)]*\)", "", expression)
        names = set(re.findall(r"[a-zA-Z_:][\w:]*", bare)) - WORDS
        assert names
        assert names <= known, expression


def test_panels_are_numbered_and_do_not_overlap() -> None:
    panels = json.loads(BOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        mine = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not mine & cells, panel["title"]
        assert place["x"] + place["w"] <= 24
        cells |= mine
