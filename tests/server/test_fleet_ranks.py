"""Protects a fleet whose replicas run on several ranks: answers, adapters, and a rank that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from fleets import PROMPT, Fleet, is_ready, started, wait_for

from manylora.testing.tiny_models import reference_generate

pytest.importorskip("ray", reason="the extra fleet is not installed: pip install -e '.[fleet]'")
pytestmark = pytest.mark.timeout(600)


def followers(pid: int) -> list[int]:
    """The other ranks of a replica, which are its children."""
    found = subprocess.run(["ps", "--ppid", str(pid), "-o", "pid=,args="], capture_output=True, text=True)
    lines = [line.split(None, 1) for line in found.stdout.splitlines()]
    return [int(number) for number, command in lines if "manylora.engine.follower" in command]


def check(fleet: Fleet) -> None:
    for name in ("base", "a0"):
        answer = fleet.complete(name)
        assert answer.status_code == 200, answer.text
        adapter = None if name == "base" else fleet.root / name
        expected = reference_generate(fleet.model, adapter, PROMPT, 6)
        assert answer.json()["choices"][0]["token_ids"] == expected


def test_a_replica_of_two_ranks_comes_back_whole_when_one_is_killed(tmp_path: Path) -> None:
    with started(tmp_path, 1, "--tp-size", "2", "--dtype", "float32") as fleet:
        check(fleet)
        [replica] = fleet.replicas()
        [rank] = followers(replica["pid"])
        os.kill(rank, signal.SIGKILL)
        wait_for(lambda: not Path(f"/proc/{replica['pid']}").exists())
        wait_for(lambda: is_ready(fleet.url) and fleet.replicas(), 240)
        [another] = fleet.replicas()
        assert another["pid"] != replica["pid"]
        [fresh] = followers(another["pid"])
        assert fresh != rank
        check(fleet)
        left = fresh
    wait_for(lambda: not Path(f"/proc/{left}").exists(), 30)
