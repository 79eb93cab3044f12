"""Protects `make gpu-static`: it finds the main loop, and no spill, in the choice that was nearest to one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SPILLED = 16  # bytes of a thread


@pytest.mark.extended
@pytest.mark.timeout(600)  # the machine may have much else to do
def test_wide_prompts_in_float32_do_not_spill(tmp_path: Path) -> None:
    case, page = "float32, prompts, heads of 256, 8-bit", tmp_path / "page.md"
    options = ["--arch", "100", "--only", "attention", "--case", case, "--out", str(page)]
    done = run(["benchmarks/gpu_static.py", *options], tmp_path)
    assert (done.returncode, done.stderr.strip()) == (0, "no spills")
    ((kernel, name, _, registers, spilled, *_, cores, loop, _),) = table(page)
    assert kernel == "_attend" and name.startswith(case)
    assert int(registers) > 64 and int(spilled) <= SPILLED
    assert cores == "HMMA" and int(loop) > 1000, "the main loop was found"


def run(arguments: Sequence[str], cache: Path) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT / "benchmarks")}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT, timeout=580)


def table(page: Path) -> list[list[str]]:
    """The rows of a page's tables, each after the name of its kernel."""
    rows, kernel = [], ""
    for line in page.read_text("utf-8").splitlines():
        if line.startswith("## "):
            kernel = line.strip("# `")
        elif line.startswith("| ") and kernel and not line.startswith("| case "):
            rows.append([kernel, *(cell.strip() for cell in line.split("|")[1:-1])])
    return rows
