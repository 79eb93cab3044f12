"""Protects tools/fill_template.py: the command lines people have."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).resolve().parents[2] / "tools" / "fill_template.py"
sys.path.insert(0, str(TOOL.parent))

from fill_template import split  # noqa: E402


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, TOOL, *arguments], capture_output=True, text=True, check=False)


def test_split() -> None:
    assert split("a,b,c", ",") == ["a", "b", "c"]
    assert split("a\\,b\\,c", ",") == ["a,b,c"]
    assert split("a\\,b\\,c", ":") == ["a,b,c"]


def test_prints_or_writes_and_leaves_what_is_not_named(tmp_path: Path) -> None:
    file = tmp_path / "config.pbtxt"
    file.write_text("x: ${one} y: ${two} q: ${max_queue_size} d: ${max_queue_delay_microseconds}\n")
    printed = run(str(file), "one:1;2")
    assert printed.stdout == "x: 1;2 y: ${two} q: 1024 d: 0\n\n"
    assert "${one}" in file.read_text()
    assert run("-i", str(file), "one:C\\\\:d\\,e").stdout == ""
    assert file.read_text() == "x: C:d,e y: ${two} q: 1024 d: 0\n"
    assert run("-i", str(file), "two:").returncode == 0
    assert file.read_text() == "x: C:d,e y:  q: 1024 d: 0\n"


def test_runs_on_a_python_that_has_nothing_installed(tmp_path: Path) -> None:
    file = tmp_path / "config.pbtxt"
    file.write_text("x: ${one}")
    subprocess.run([sys.executable, "-S", TOOL, "-i", file, "one:1"], check=True)
    assert file.read_text() == "x: 1"


def test_refuses_unknown_keys_and_missing_colons(tmp_path: Path) -> None:
    file = tmp_path / "config.pbtxt"
    file.write_text("x: ${one}")
    unknown = run("-i", str(file), "three:1")
    assert unknown.returncode == 1
    assert f"key 'three' does not exist in the file {file}." in unknown.stderr
    assert run(str(file), "one").returncode == 1
    assert file.read_text() == "x: ${one}"
