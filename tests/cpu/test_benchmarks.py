"""Protects the benchmarks: a worker answers, and the GPU's runs through with torch, triton and numpy alone
and writes what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))  # scripts, not a package


DEMO = ROOT / "examples" / "demo"
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
