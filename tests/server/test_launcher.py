"""Protects the supervision: what dies comes back without a person, what cannot start says why."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from conftest import Running, World, fill_repo, new_server
from test_server import NEW, PROMPT, ask, inputs, new_ids


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def wait_ready(server: Running, old: int) -> int:
    for _ in range(150):
        state = server.state()
        if state["state"] == "ready" and state["server"] != old:
            return state["server"]
        time.sleep(0.2)
    raise AssertionError("the service did not come back")


def test_a_killed_process_is_replaced_and_leaves_no_orphan(server: Running) -> None:
    pid = server.state()["server"]
    assert len(children(pid)) == 3
    for which in ("stub", "server"):
        stubs = children(pid)
        os.kill(stubs[-1] if which == "stub" else pid, signal.SIGKILL)
        fresh = wait_ready(server, pid)
        assert len(new_ids(ask(server, inputs()))) == len(PROMPT) + NEW
        assert not any(Path(f"/proc/{gone}").exists() for gone in [pid, *stubs])
        pid = fresh


def test_a_start_that_cannot_work_says_why(world: World, tmp_path: Path) -> None:
    repo = fill_repo(tmp_path / "repo", world.model, lora_cache_max_adapter_size="many")
    failed = new_server(repo).launch()
    assert failed.returncode == 1
    assert "parameter lora_cache_max_adapter_size must be a whole number, got 'many'" in failed.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--world_size=2",), "--world_size must be 1"),
        (("--multi-model",), "--multi-model"),
        (("--model_repo=/nowhere",), "holds no"),
    ],
)
def test_flags_without_meaning_are_refused_by_name(tmp_path: Path, flags: tuple, words: str) -> None:
    refused = new_server(tmp_path).launch(*flags)
    assert refused.returncode == 1
    assert words in refused.stderr


def test_an_unfilled_repository_and_a_port_in_use(server: Running) -> None:
    root = Path(__file__).resolve().parents[2]
    unfilled = new_server(root / "model_repo").launch()
    assert "is not filled" in unfilled.stderr
    taken = Running(server.repo, server.http, *server_ports(server)).launch()
    assert f"--http_port {server.http} is in use" in taken.stderr


def server_ports(server: Running) -> tuple[int, int]:
    return server.grpc, server.metrics
