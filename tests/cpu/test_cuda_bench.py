"""Protects the GPU benchmark: it runs through with torch, triton and numpy alone, and writes what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOREIGN = ("safetensors", "tokenizers", "llguidance", "jinja2", "transformers", "peft", "pydantic", "tqdm")
SCRIPT = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({FOREIGN!r}))  # as if they were not installed
sys.argv[0] = "benchmarks/gpu.py"
sys.path.insert(0, "benchmarks")
runpy.run_path("benchmarks/gpu.py", run_name="__main__")
"""


@pytest.mark.extended
@pytest.mark.timeout(600)  # the machine may have much else to do
def test_the_benchmark_runs_without_any_other_package(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "--device", "cpu", "--tiny", "--out", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    sections = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))["sections"]
    assert "Skipped" not in sections, sections["Skipped"]
    assert [row["model"] for row in sections["Check"]] == ["tiny", "tiny experts", "tiny windows"]
    assert {"Decode step", "R_base", "Base-only tax", "Bandwidth"} <= sections.keys()
    few = sections["Throughput, rank 8, 7 modules, zipf"][1]
    assert few["on_the_device"] < few["adapters"] and few["loads"] > 0
    assert (tmp_path / "gpu.md").read_text(encoding="utf-8").count("\n## ") == len(sections)
    assert "Targets" not in sections, "a CPU's figures get no verdict"


def test_targets_keep_the_worst_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from gpu_report import TARGETS, Report

    report = Report({"device": "a GPU"})
    for value in (0.97, 0.94, 0.99):
        report.hold("ratio", value)
    for value in (0.2, 0.9):
        report.hold("host", value)
    report.write(tmp_path)
    rows = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))["sections"]["Targets"]
    assert len(rows) == len(TARGETS) == 7
    by_name = {row["target"]: (row["worst"], row["result"]) for row in rows}
    assert by_name[TARGETS["ratio"].what] == (0.94, "missed")
    assert by_name[TARGETS["host"].what] == (0.9, "met")
    assert by_name[TARGETS["zipf"].what] == ("", "not measured")
