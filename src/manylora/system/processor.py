"""Instruction-set levels for which our C code is compiled, and which of them this processor supports."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Level:
    """needs: features required in /proc/cpuinfo. options: for GCC and clang of any version. target, cpu: for
    zig.
    """

    name: str
    machine: str
    needs: frozenset[str]
    options: tuple[str, ...]
    target: str
    cpu: str


V3 = "avx2 fma f16c bmi1 bmi2 abm movbe"
V3_OPTIONS = ("-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-mlzcnt", "-mmovbe", "-mpopcnt", "-mcx16")
V4 = "avx512f avx512bw avx512cd avx512dq avx512vl"
V4_OPTIONS = ("-mavx512f", "-mavx512bw", "-mavx512cd", "-mavx512dq", "-mavx512vl")
X86, ARM = "x86_64-linux-gnu.2.17", "aarch64-linux-gnu.2.17"
LEVELS = (
    Level("x86-64-v4", "x86_64", frozenset(f"{V3} {V4}".split()), V3_OPTIONS + V4_OPTIONS, X86, "x86_64_v4"),
    Level("x86-64-v3", "x86_64", frozenset(V3.split()), V3_OPTIONS, X86, "x86_64_v3"),
    Level("x86-64", "x86_64", frozenset(), (), X86, "x86_64"),
    Level("aarch64", "aarch64", frozenset({"asimd"}), (), ARM, "generic"),
)
"""Best first. glibc 2.17 is older than what torch requires."""


def find_levels() -> list[Level]:
    """The levels that this processor can execute, best first."""
    known = read_features()
    return [level for level in LEVELS if level.machine == platform.machine() and level.needs <= known]


def read_features() -> frozenset[str]:
    """Features that the kernel reports for programs. Empty if unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    named = (line.partition(":")[2] for line in lines if line.startswith(("flags", "Features")))
    rows = [frozenset(words.split()) for words in named]
    return frozenset.intersection(*rows) if rows else frozenset()
