"""Protects how far a reader follows a warm request: through as few files of src as `ways.py` says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_a_warm_request_runs_through_few_files() -> None:
    script = Path(__file__).resolve().parents[1] / "ways.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
