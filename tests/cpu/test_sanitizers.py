"""Protects that no compiled kernel reads or writes beyond what it was given, or does what C leaves undefined:
the kernels' own tests run once more on a library that gcc has built with its sanitizers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from manylora.system.compiler import LEVELS, find_compiler, find_levels

TESTS = Path(__file__).parents[1]
KERNELS = ("kernels", "float8_kernels", "mix_kernels", "weighed_kernels", "expert_kernels")
KERNELS += ("products", "quant", "integer", "delta_rule", "mamba2")
KERNELS += ("loading", "file_adapter", "decode_step")
# The C++ library because the first looks for it when it starts.
RUNTIMES = ("libasan.so", "libubsan.so", "libstdc++.so")
BEYOND = """
import numpy, sanitized
from manylora.kernels import native
values = numpy.zeros(5, numpy.float32)
native.load().widen_float32(values.ctypes.data, values.ctypes.data, 6, 2)
"""


@pytest.fixture(params=[level.name for level in LEVELS])
def environment(request: pytest.FixtureRequest) -> dict[str, str]:
    """Of a process with the sanitizers' runtimes."""
    compiler = find_compiler()
    if compiler is None or compiler.kind != "gcc":
        pytest.skip("needs gcc, which has the sanitizers")
    if request.param not in {level.name for level in find_levels()}:
        pytest.skip(f"this processor has not all of {request.param}")
    asked = [[*compiler.command, f"-print-file-name={name}"] for name in RUNTIMES]
    files = [subprocess.run(one, capture_output=True, text=True, check=True).stdout.strip() for one in asked]
    if not all(map(os.path.isabs, files)):
        pytest.skip("this gcc has no sanitizers")
    return os.environ | {
        "LD_PRELOAD": " ".join(files),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
        "MANYLORA_NATIVE": request.param,
        "PYTHONPATH": str(TESTS),
        "OMP_NUM_THREADS": "2",
    }


@pytest.mark.extended
def test_an_element_too_many_is_found(environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BEYOND], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode and "heap-buffer-overflow" in done.stderr, done.stderr


@pytest.mark.extended
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kernels", KERNELS)
def test_kernels_stay_in_their_memory(environment: dict[str, str], kernels: str) -> None:
    options = ["-x", "-q", "-s", "--all", "-p", "sanitized", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options]
    done = subprocess.run(
        [*command, "-k", "not torch and not numpy and not simde", TESTS / "cpu" / f"test_{kernels}.py"],
        cwd=TESTS.parent, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-2000:] + done.stderr[:2000]
