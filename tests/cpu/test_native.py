"""Protects the start without kernels, without a compiler or with a full disk: torch is used, and said."""

from __future__ import annotations

import dataclasses
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from levels import find_levels

from manylora.kernels import native
from manylora.system import compiler


@pytest.fixture(autouse=True)
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


def write_compiler(folder: Path, says: str) -> None:
    path = folder / "cc"
    path.write_text(f"#!/bin/sh\n[ $1 = --version ] && exit 0\necho '{says}' >&2\nexit 1\n", encoding="utf-8")
    path.chmod(0o755)


def outcome(caplog: pytest.LogCaptureFixture) -> str:
    """What is logged when the kernels are asked for, more than once."""
    with caplog.at_level(logging.INFO, "manylora"):
        assert native.load() is None and native.load() is None and native.loaded() is None
    (record,) = caplog.records
    return record.getMessage()


def test_they_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("MANYLORA_NATIVE", "0")
    assert "off (MANYLORA_NATIVE=0), torch is used" in outcome(caplog)


def test_no_compiler(caplog: pytest.LogCaptureFixture) -> None:
    assert "there is no compiler, torch is used" in outcome(caplog)


def test_a_compiler_that_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_compiler(tmp_path, "Assembler messages:\nFatal error: No space left on device")
    said = outcome(caplog)
    assert "torch is used: Assembler messages: Fatal error: No space left on device" in said, "one line"
    assert not list((tmp_path / "cache" / "manylora").iterdir()), "something was left behind"


def test_nowhere_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_compiler(tmp_path, "never called")
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/cache")
    monkeypatch.setattr(tempfile, "tempdir", "/dev/null")
    assert "could not be built, torch is used" in outcome(caplog)


def test_another_processor(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(compiler.platform, "machine", lambda: "riscv64")
    assert "none for this processor, torch is used" in outcome(caplog)


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


def test_a_level_can_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []
    monkeypatch.setattr(native, "open_level", lambda level: (asked.append(level.name), (object(), "here"))[1])
    levels = [level.name for level in find_levels()]
    for wanted, taken in [(levels[-1], levels[-1]), ("1", levels[0]), ("avx9", levels[0])]:
        monkeypatch.setenv("MANYLORA_NATIVE", wanted)
        native.load.cache_clear()
        assert native.load() is not None and asked.pop() == taken
    assert "MANYLORA_NATIVE must be 0, 1 or one of" in caplog.text
