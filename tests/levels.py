"""The compiled kernels for every level of instruction sets that can run here, also emulated."""

from __future__ import annotations

import ctypes
import dataclasses
import fcntl
import zlib
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from selection import extended

from manylora.kernels import native
from manylora.system.compiler import (
    LEVELS,
    Compiler,
    Level,
    Source,
    build_library,
    find_compiler,
    find_levels,
    find_zig,
)

SIMULATED = "x86-64-v4 by simde"
NAMES = (*(level.name for level in LEVELS), SIMULATED)
"""What `open_library` knows; tests that take one of them skip those that cannot run."""
BEST = next((level.name for level in find_levels()), NAMES[0])
PARAMS = [BEST, *extended(*(name for name in NAMES if name != BEST))]
"""Each of NAMES, of which `make test` runs this processor's best."""
HEADER = Path(__file__).with_name("avx512.h")


@lru_cache
def open_library(name: str) -> Any:
    """As `native.load()`, for this level. Skips the test, with the reason, where it cannot run."""
    ours = {level.name: level for level in find_levels()}
    if name in ours:
        library, _ = native.open_level(ours[name])
        if library is None:
            pytest.skip("there are no kernels in this installation, and no compiler")
        return library
    if name == SIMULATED:
        return _simulated(ours)
    if name != "aarch64":
        pytest.skip(f"this processor has not all of {name}")
    return _emulated(next(level for level in LEVELS if level.name == name))


def _simulated(ours: dict[str, Level]) -> ctypes.CDLL:
    """The code for AVX-512, its intrinsics in portable C."""
    if "x86-64-v4" in ours:
        pytest.skip("this processor runs the code for AVX-512 itself")
    gcc = find_compiler()
    if gcc is None or gcc.kind != "gcc" or not Path("/usr/include/simde").exists():
        pytest.skip("needs gcc and simde: apt install gcc libsimde-dev")
    if "x86-64-v3" not in ours:
        pytest.skip("this processor has not all of x86-64-v3")
    made_of = f"-DHEADER={zlib.crc32(HEADER.read_bytes())}"
    options = ("-O1", *native.SOURCE.options[1:], "-Wno-psabi", made_of, "-include", str(HEADER))
    source = dataclasses.replace(native.SOURCE, name="simulated", options=options)
    return _built(gcc, source, ours["x86-64-v3"])


@lru_cache
def open_products() -> ctypes.CDLL:
    """The library of this process, with the products of bytes and of bfloat16 that some processors have in
    plain C. Skips the test where there is no compiler."""
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("there is no C compiler")
    options = (*native.SOURCE.options, "-O1", "-DEMULATED")  # compiled sooner
    source = dataclasses.replace(native.SOURCE, name="emulated", options=options)
    return _built(compiler, source, find_levels()[0])


def _built(compiler: Compiler, source: Source, level: Level) -> ctypes.CDLL:
    """By one process, while others wait for it."""
    with HEADER.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        return native.open_library(build_library(compiler, source, level))


def _emulated(level: Level) -> Any:
    emulated = pytest.importorskip("emulated", reason="needs unicorn and pyelftools: pip install -e '.[dev]'")
    path = native.SOURCE.prebuilt / native.SOURCE.file_name(level)
    if not path.exists():
        zig = find_zig()
        if zig is None:
            pytest.skip("needs a compiler for aarch64: pip install ziglang")
        path = build_library(zig, native.SOURCE, level)
    return emulated.EmulatedLibrary(path)
