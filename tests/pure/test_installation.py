"""Protects the first start of a Triton server: a machine on which the Python backend cannot run is named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from manylora.errors import ConfigError
from manylora.launcher.installation import STUBS, find_tritonserver


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    """In a wheel's folder."""
    server = tmp_path / "pytriton" / "tritonserver"
    stub = (
        server / STUBS / f"{sys.version_info.major}.{sys.version_info.minor}" / "triton_python_backend_stub"
    )
    for path in (stub, server / "bin" / "tritonserver"):
        path.parent.mkdir(parents=True)
        path.write_text("#!/bin/sh\n", encoding="utf-8")
        path.chmod(0o755)
    return stub


def test_a_folder_without_execution_is_named(stub: Path, tmp_path: Path) -> None:
    """A file that may not be executed stands for a disk mounted with noexec: the system's answer is equal."""
    stub.chmod(0o644)
    server, run_dir = str(stub.parents[2] / "bin" / "tritonserver"), tmp_path / "run"
    with pytest.raises(ConfigError, match=f"^{run_dir} is on a disk .*noexec.*: set TMPDIR to a folder"):
        find_tritonserver(server, run_dir)


def test_a_machine_without_ldd_is_no_reason(
    stub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    server = stub.parents[2] / "bin" / "tritonserver"
    found = find_tritonserver(str(server), tmp_path / "run")
    assert found.binary == server and (tmp_path / "run/backends/python" / stub.name).exists()
