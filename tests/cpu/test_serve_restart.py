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
from selection import extended
from tiny_models import make_model
from waiting import answers
from waiting import wait_for_named as wait_for

from manylora.cli import main
from manylora.doors.triton.launcher.processes import free_port


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
    command = [sys.executable, "-m", "manylora.doors.cli.serve", str(model), "--port", str(port), "--restart"]
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


@pytest.mark.extended
def test_one_process_comes_back_after_a_kill(tmp_path: Path) -> None:
    check_restart(tmp_path, 1)


@pytest.mark.parametrize(
    "flags", [("--tp-size", "2"), *extended(("--tp-size", "2", "--pp-size", "2"))], ids=["two", "four"]
)
def test_a_killed_rank_0_leaves_no_rank_and_all_come_back(tmp_path: Path, flags: tuple[str, ...]) -> None:
    check_restart(tmp_path, 2 ** (len(flags) // 2), *flags)


def check_restart(tmp_path: Path, ranks: int, *flags: str) -> None:
    """A kill while clients read, and then a signal while one does."""
    with served(make_model(tmp_path / "tiny", "llama", seed=11), *flags) as (keeper, url):
        server = server_of(keeper.pid)
        others = followers_of(server)
        assert len(others) == ranks - 1
        with stream(url), stream(url, 64) as lines:
            os.kill(server, signal.SIGKILL)
            with pytest.raises(httpx2.TransportError):
                list(lines)
        wait_for("the other ranks' end", lambda: gone(others))
        wait_for("the server again", lambda: answers(f"{url}/health"))
        again = followers_of(server_of(keeper.pid))
        assert len(again) == ranks - 1 and not again & others
        with stream(url) as lines:
            everyone = children(keeper.pid)
            keeper.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert keeper.wait(60) == 0
    wait_for("everyone's end", lambda: gone(everyone | again))


def command_line(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " ")
    return ""  # it has just ended


def test_restart_needs_a_port_that_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(tmp_path), "--port", "0", "--restart"]) == 1
    assert "restart needs a port of its own" in capsys.readouterr().err
