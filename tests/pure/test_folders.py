"""Protects disks: a temporary folder goes with its process, however that ends, and nobody else's ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from manylora.system.folders import make_temporary, remove_temporary

MAKES = """
from manylora.system.folders import make_temporary
print(make_temporary('test'), flush=True)
(made := make_temporary('test')).joinpath('file').touch()
print(made, flush=True)
"""


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def another(then: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", MAKES + then], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("then", ["", "raise ValueError"])
def test_a_process_that_ends_leaves_nothing(base: Path, then: str) -> None:
    with another(then) as process:
        process.communicate(timeout=60)
    assert not list(base.iterdir())


def test_a_killed_process_leaves_what_the_next_one_removes(base: Path) -> None:
    with another("input()") as process:
        assert process.stdout is not None
        left = [Path(process.stdout.readline().strip()) for _ in range(2)]
        assert all(folder.is_dir() for folder in left)
        mine = make_temporary("other")
        assert sorted(base.iterdir()) == sorted([*left, mine]), "those of a living process stay"
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    assert left[0].is_dir()
    remove_temporary(make_temporary("other"))
    assert list(base.iterdir()) == [mine]
    remove_temporary(mine)
    assert not list(base.iterdir())


def test_what_is_not_abandoned_by_this_user_stays(base: Path) -> None:
    user = os.getuid()
    kept = [base / name for name in (
        f"manylora-{user}-8000", "manylora-uploads-abcdefgh", f"manylora-{user + 1}-uploads-abcdefgh",
        f"manylora-{user}-uploads-abcdefghi",
    )]  # fmt: skip
    for folder in kept:
        folder.mkdir()
    target = base / "elsewhere"
    target.mkdir()
    link, file = base / f"manylora-{user}-uploads-bbbbbbbb", base / f"manylora-{user}-uploads-cccccccc"
    link.symlink_to(target)
    file.touch()
    kept += [target, link, file]
    if user == 0:
        foreign = base / f"manylora-{user}-uploads-dddddddd"
        foreign.mkdir()
        os.chown(foreign, 12345, 12345)
        kept.append(foreign)
    (base / f"manylora-{user}-uploads-aaaaaaaa" / "deep").mkdir(parents=True)
    remove_temporary(make_temporary("test"))
    assert sorted(base.iterdir()) == sorted(kept)
