"""Protects the first start of a Triton server: templates and who fills them with their own tool, and a
machine on which the Python backend cannot run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from manylora.doors.triton.launcher.server_command import STUBS, find_tritonserver
from manylora.doors.triton.launcher.templates import check_filled, with_defaults
from manylora.errors import ConfigError

TEXT = """name: "m" # ${comment}
max_batch_size: 4
data_type: ${lora_weights_data_type}
value: "${max_beam_width}"
"""


def repository(path: Path, text: str) -> Path:
    (path / "m" / "1").mkdir(parents=True)
    (path / "m" / "1" / "model.py").write_text("pass\n", encoding="utf-8")
    (path / "m" / "config.pbtxt").write_text(text, encoding="utf-8")
    return path


def test_defaults_are_filled_beside_the_repository(tmp_path: Path) -> None:
    repo = repository(tmp_path / "repo", TEXT)
    check_filled(repo / "m" / "config.pbtxt")
    served = with_defaults(repo, tmp_path / "run")
    assert (served / "m" / "config.pbtxt").read_text(encoding="utf-8") == TEXT.replace(
        "${lora_weights_data_type}", "TYPE_FP16"
    )
    assert (served / "m" / "1" / "model.py").read_text(encoding="utf-8") == "pass\n"
    assert (repo / "m" / "config.pbtxt").read_text(encoding="utf-8") == TEXT


def test_a_filled_repository_is_served_as_it_is(tmp_path: Path) -> None:
    repo = repository(tmp_path / "repo", TEXT.replace("${lora_weights_data_type}", "TYPE_FP16"))
    assert with_defaults(repo, tmp_path / "run") == repo


def test_a_template_filled_for_the_cpp_backend_is_served_by_the_python_one(tmp_path: Path) -> None:
    """triton_backend:tensorrtllm stands in every fill line of TensorRT-LLM's users."""
    repo = repository(
        tmp_path / "repo", 'name: "m"\nbackend: "tensorrtllm"\nvalue: "backends/tensorrtllm/x"\n'
    )
    served = with_defaults(repo, tmp_path / "run")
    assert (served / "m" / "config.pbtxt").read_text(encoding="utf-8") == (
        'name: "m"\nbackend: "python"\nvalue: "backends/tensorrtllm/x"\n'
    )
    assert (served / "m" / "1" / "model.py").is_file()


def test_what_has_no_default_is_named(tmp_path: Path) -> None:
    repo = repository(tmp_path / "repo", TEXT.replace("4", "${triton_max_batch_size}"))
    with pytest.raises(ConfigError, match=r"fill_template.py with triton_max_batch_size:<value>"):
        check_filled(repo / "m" / "config.pbtxt")


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
