"""Protects a fleet whose replicas run on several ranks: answers, adapters, and a rank that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from fleets import is_ready, started
from waiting import wait_for

pytest.importorskip("ray", reason="the extra fleet is not installed: pip install -e '.[fleet]'")
pytestmark = pytest.mark.timeout(600)


def followers(pid: int) -> list[int]:
    """The other ranks of a replica, which are its children."""
    found = subprocess.run(["ps", "--ppid", str(pid), "-o", "pid=,args="], capture_output=True, text=True)
    lines = [line.split(None, 1) for line in found.stdout.splitlines()]
    return [int(number) for number, command in lines if "manylora.engine.follower" in command]


def test_a_replica_of_two_ranks_comes_back_whole_when_one_is_killed(tmp_path: Path) -> None:
    with started(tmp_path, 1, "--tp-size", "2", "--dtype", "float32") as fleet:
        fleet.check_answers("base", "a0")
        [replica] = fleet.replicas()
        [rank] = followers(replica["pid"])
        os.kill(rank, signal.SIGKILL)
        wait_for(lambda: not Path(f"/proc/{replica['pid']}").exists())
        wait_for(lambda: is_ready(fleet.url) and fleet.replicas(), 240)
        [another] = fleet.replicas()
        assert another["pid"] != replica["pid"]
        [fresh] = followers(another["pid"])
        assert fresh != rank
        fleet.check_answers("base", "a0")
        left = fresh
    wait_for(lambda: not Path(f"/proc/{left}").exists())
