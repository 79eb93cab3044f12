"""Protects the start: a GPU that cannot be used is named with its reason, not passed over; without kernels,
without a compiler or with a full disk, torch is used, and said."""

from __future__ import annotations

import dataclasses
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from levels import find_levels

from manylora.errors import ConfigError
from manylora.kernels import native
from manylora.kernels.cuda.ops import CudaOps
from manylora.kernels.device import _check_launch, open_device
from manylora.system import compiler

OLD = "The NVIDIA driver on your system is too old (found version 11040).\nPlease update your GPU driver."


def broken(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    def init() -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_a_gpu_that_cannot_be_used_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, OLD)
    with pytest.raises(ConfigError, match=r"too old \(found version 11040\). Please update.*device cpu$"):
        open_device(name)


def test_no_gpu_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, "No CUDA GPUs are available")
    assert open_device("auto").torch.type == "cpu"
    with pytest.raises(ConfigError, match="no CUDA GPU is available"):
        open_device("cuda:0")


def test_a_kernel_is_launched_when_the_device_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = CudaOps()
    _check_launch(ops, torch.device("cpu"))

    def fails(*arguments: Any) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(ops, "rms_norm", fails)
    with pytest.raises(ConfigError, match=r"Failed to find C compiler.*python3-dev"):
        _check_launch(ops, torch.device("cpu"))


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_no_more_threads_than_processors_that_the_groups_allow(
    monkeypatch: pytest.MonkeyPatch, threads: None
) -> None:
    monkeypatch.setattr("manylora.kernels.device.usable_processors", lambda: 3)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    torch.set_num_threads(5)
    assert open_device("cpu").name == "CPU (5 threads)", "the user has said so"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert open_device("cpu").name == "CPU (3 threads)"
    torch.set_num_threads(2)
    assert open_device("cpu").name == "CPU (2 threads)"


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Kernels that neither this installation nor the cache has; the compiler is `cc` in `tmp_path`."""
    other = dataclasses.replace(native.SOURCE, options=("-DOTHER",))
    monkeypatch.setattr(native, "SOURCE", other)
    monkeypatch.setenv("PATH", f"{tmp_path}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "find_zig", lambda: None)
    native.load.cache_clear()
    yield
    native.load.cache_clear()


@pytest.mark.usefixtures("unbuilt")
@pytest.mark.parametrize(
    ("compiler_says", "environment", "machine", "said"),
    [
        ("", {"MANYLORA_NATIVE": "0"}, "", "off (MANYLORA_NATIVE=0), torch is used"),
        ("", {}, "", "there is no compiler, torch is used"),
        ("Messages:\\nNo space left", {}, "", "torch is used: Messages: No space left"),  # in one line
        ("never", {"XDG_CACHE_HOME": "/dev/null/c"}, "", "could not be built, torch is used"),
        ("", {}, "riscv64", "none for this processor, torch is used"),
    ],
    ids=["switched off", "no compiler", "a compiler that fails", "nowhere to write", "another processor"],
)
def test_a_start_without_kernels_says_why(
    compiler_says: str, environment: dict[str, str], machine: str, said: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Once, however often the kernels are asked for; and leaves nothing behind."""
    if compiler_says:
        cc = tmp_path / "cc"
        cc.write_text(f"#!/bin/sh\n[ $1 = --version ] && exit 0\nprintf '{compiler_says}' >&2\nexit 1\n")
        cc.chmod(0o755)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if "XDG_CACHE_HOME" in environment:
        monkeypatch.setattr(tempfile, "tempdir", "/dev/null")
    if machine:
        monkeypatch.setattr(compiler.platform, "machine", lambda: machine)
    with caplog.at_level(logging.INFO, "manylora"):
        assert native.load() is None and native.load() is None and native.loaded() is None
    (record,) = caplog.records
    assert said in record.getMessage()
    assert not list((tmp_path / "cache").glob("manylora/*"))


def test_the_best_level_is_taken_that_the_processor_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler.platform, "machine", lambda: "x86_64")
    for features, best in (
        (f"{compiler.V3} {compiler.V4} sse2", "x86-64-v4"),
        (f"{compiler.V3} avx512f sse2", "x86-64-v3"),
        ("avx2 sse2", "x86-64"),
        ("", "x86-64"),
    ):
        monkeypatch.setattr(compiler, "read_features", lambda given=features: frozenset(given.split()))
        assert find_levels()[0].name == best


@pytest.mark.usefixtures("unbuilt")
def test_a_level_can_be_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    asked = []
    monkeypatch.setattr(native, "open_level", lambda level: (asked.append(level.name), (object(), "here"))[1])
    levels = [level.name for level in find_levels()]
    for wanted, taken in [(levels[-1], levels[-1]), ("1", levels[0]), ("avx9", levels[0])]:
        monkeypatch.setenv("MANYLORA_NATIVE", wanted)
        native.load.cache_clear()
        assert native.load() is not None and asked.pop() == taken
    assert "MANYLORA_NATIVE must be 0, 1 or one of" in caplog.text
