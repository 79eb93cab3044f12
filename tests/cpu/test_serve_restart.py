"""Protects a server that was told to come back: when its process is killed, clients see a closed connection
and then the service again, and a signal still lets what is under way end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx2
import pytest
from waiting import answers
from waiting import wait_for_named as wait_for

from manylora.launcher.processes import free_port
from manylora.testing.tiny_models import make_model


def children(pid: int) -> set[int]:
    """The processes that a process has started, on whatever thread."""
    found = set[int]()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # a thread that has just ended
            found |= set(map(int, (task / "children").read_text().split()))
    return found


@contextmanager
def stream(url: str, n: int = 1) -> Iterator[Iterator[str]]:
    """The lines of a long answer that has begun. n: of so many answers at once, which take longer."""
    body = {"model": "tiny", "prompt": "a", "max_tokens": 250, "ignore_eos": True, "stream": True, "n": n}
    with httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        yield lines


@contextmanager
def served(model: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """`manylora serve --restart`, which is ready; and its address."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "manylora.commands.serve", str(model), "--port", str(port), "--restart"]
    with subprocess.Popen([*command, *flags]) as keeper:
        try:
            wait_for("the server", lambda: answers(f"{url}/health"))
            yield keeper, url
        finally:
            keeper.terminate()


def server_of(keeper: int) -> int:
    [server] = [pid for pid in children(keeper) if "--no-restart" in command_line(pid)]
    return server


def followers_of(server: int) -> set[int]:
    """The processes of other ranks."""
    return {pid for pid in children(server) if "manylora.engine.follower" in command_line(pid)}


def gone(pids: set[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_serve_comes_back_after_a_kill_and_drains_at_a_signal(tmp_path: Path) -> None:
    with served(make_model(tmp_path / "tiny", "llama", seed=11)) as (keeper, url):
        server = server_of(keeper.pid)
        with stream(url, 64) as lines:
            os.kill(server, signal.SIGKILL)
            with pytest.raises(httpx2.TransportError):
                list(lines)
        wait_for("the server again", lambda: answers(f"{url}/health"))
        with stream(url) as lines:
            everyone = children(keeper.pid)
            keeper.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert keeper.wait(60) == 0
    wait_for("everyone's end", lambda: gone(everyone))


def test_a_killed_rank_0_leaves_no_rank_and_all_come_back(tmp_path: Path) -> None:
    model = make_model(tmp_path / "tiny", "llama", seed=11)
    with served(model, "--tp-size", "2", "--pp-size", "2") as (keeper, url):
        server = server_of(keeper.pid)
        others = followers_of(server)
        assert len(others) == 3
        with stream(url), stream(url, 64) as lines:
            os.kill(server, signal.SIGKILL)
            with pytest.raises(httpx2.TransportError):
                list(lines)
        wait_for("the other ranks' end", lambda: gone(others))
        wait_for("the server again", lambda: answers(f"{url}/health"))
        with stream(url) as lines:
            assert [line for line in lines if line][-1] == "data: [DONE]"
        again = followers_of(server_of(keeper.pid))
        assert len(again) == 3 and not again & others
        keeper.send_signal(signal.SIGTERM)
        assert keeper.wait(60) == 0
        wait_for("everyone's end", lambda: gone(again))


def command_line(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " ")
    return ""  # it has just ended


def test_restart_needs_a_port_that_stays(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "manylora.commands.serve", str(tmp_path), "--port", "0", "--restart"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (refused.returncode, "restart needs a port of its own" in refused.stderr) == (1, True)
