"""Report: rows of figures by section, and the worst measured figure of each target."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """A bound for figures: at least `bound`, or at most `bound` if `at_most`."""

    what: str
    bound: float
    at_most: bool = False

    def worse(self, one: float, other: float) -> float:
        return max(one, other) if self.at_most else min(one, other)

    def met(self, value: float) -> bool:
        return value <= self.bound if self.at_most else value >= self.bound


TARGETS = {
    "decode": Target("base decode step, 8B, batch 32: share of the bandwidth limit", 0.80),
    "ratio": Target("R_base over R_ideal, every number of adapters and ranks", 0.95),
    "tax": Target("base-only steps after adapters over before", 0.99),
    "prefill": Target("prefill with adapters: share of its speed without", 0.93),
    "host": Target("first token, adapter on the host: decode steps later than on the device", 1.0, True),
    "file": Target("first token, adapter in a file, 8B: milliseconds later than on the device", 50.0, True),
    "zipf": Target("tokens per second, 1,000 adapters on the host, zipf: share of all on the device", 0.95),
}


@dataclass
class Report:
    """Sections of rows, in the order in which they were measured. facts: the device, versions and dtype."""

    facts: Row
    sections: dict[str, list[Row]] = field(default_factory=dict)
    worst: dict[str, float] = field(default_factory=dict)

    def add(self, section: str, **values: Any) -> None:
        self.sections.setdefault(section, []).append(values)
        print(section, " ".join(f"{k}={text(v)}" for k, v in values.items()), flush=True)

    def hold(self, target: str, value: float) -> None:
        """Add a figure to a target."""
        self.worst[target] = TARGETS[target].worse(self.worst.get(target, value), value)

    def targets(self) -> list[Row]:
        rows = []
        for key, target in TARGETS.items():
            value = self.worst.get(key)
            bound = f"{'at most' if target.at_most else 'at least'} {text(target.bound)}"
            says = "not measured" if value is None else "met" if target.met(value) else "missed"
            rows.append({"target": target.what, "bound": bound, "worst": "" if value is None else value})
            rows[-1]["result"] = says
        return rows

    def write(self, folder: Path) -> None:
        """Write gpu.json and gpu.md. Figures from a CPU are not compared with the targets."""
        targets = {} if self.facts["device"].startswith("CPU") else {"Targets": self.targets()}
        folder.mkdir(parents=True, exist_ok=True)
        content = {"facts": self.facts, "sections": targets | self.sections}
        (folder / "gpu.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
        lines = ["# GPU benchmark", "", *(f"- {k}: {text(v)}" for k, v in self.facts.items())]
        for name, rows in content["sections"].items():
            columns = list(dict.fromkeys(key for row in rows for key in row))
            lines += ["", f"## {name}", "", "| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
            lines += ["| " + " | ".join(text(row.get(c, "")) for c in columns) + " |" for row in rows]
        (folder / "gpu.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
