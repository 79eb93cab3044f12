"""Protects examples/rl_loop/with_trl.py: TRL's trainer with rollouts of the version that was put last."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="TRL is missing: pip install trl")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "rl_loop" / "with_trl.py"


def test_rollouts_are_of_the_version_put_last() -> None:
    """The program itself compares versions and log probabilities."""
    command = [sys.executable, str(EXAMPLE), "--steps", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "version 1: reward" in done.stdout and "version 2: reward" in done.stdout
    assert "log probabilities differ by at most" in done.stdout
