"""What the Grafana dashboard asks Prometheus for, and whether a scrape has it."""

from __future__ import annotations

import json
import re
from pathlib import Path

BOARD = Path(__file__).resolve().parents[1] / "deploy" / "grafana" / "manylora.json"
SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\{([^}]*)\}")
MATCHER = re.compile(r'(\w+)(=~|=)"([^"]*)"')
SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? \S+")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
# Of kinds of adapters that a server may not have had; tests/cpu/test_activated.py sees the samples.
OF_SOME = {"manylora_activated_tokens_total"}


def without_samples(scrape: str) -> list[str]:
    """The selectors of panels that no sample of a scrape matches, when all models are chosen. A sample that
    lacks a label matches like one in which it is empty, as in Prometheus."""
    samples = [(found[1], dict(LABEL.findall(found[2] or ""))) for found in SAMPLE.finditer(scrape)]
    board = json.loads(BOARD.read_text())
    (model,) = [one for one in board["templating"]["list"] if one["name"] == "model"]
    assert model["includeAll"] and model["current"]["value"] == "$__all"
    missing = []
    for panel in board["panels"]:
        for target in panel["targets"]:
            for name, inside in SELECTOR.findall(target["expr"].replace("$model", model["allValue"])):
                wanted = MATCHER.findall(inside)
                if name not in OF_SOME and not any(
                    name == other and _match(wanted, labels) for other, labels in samples
                ):
                    missing.append(f"{name}{{{inside}}}")
    return missing


def _match(wanted: list[tuple[str, str, str]], labels: dict[str, str]) -> bool:
    for label, how, value in wanted:
        found = labels.get(label, "")
        if not (re.fullmatch(value, found) if how == "=~" else value == found):
            return False
    return True
