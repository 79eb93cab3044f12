"""Protects the supervision: what dies or hangs comes back without a person, every client hears of it, nothing
is left behind, and all ends with the supervisor."""

from __future__ import annotations

import os
import queue
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import tritonclient.grpc as grpc
from launched import MODELS, children, is_back, is_gone, models, processes, streams
from selection import extended
from servers import Running, World, fill_repo, new_server, served
from test_server import NEW, PROMPT, ask, inputs, new_ids
from waiting import wait_for_named as wait_for

from manylora.doors.triton.launcher.server_command import shared_memory
from manylora.system.lifeline import read_reports

FAULTS = """

import time
from manylora.engine.engine import Engine

_step = Engine.step


def _faulty(engine):
    prompts = [sequence.request.prompt[0] for sequence in engine.open_sequences()]
    if 13 in prompts:
        raise MemoryError
    if 14 in prompts:
        time.sleep(10**6)
    return _step(engine)


Engine.step = _faulty
"""


@pytest.fixture(scope="module")
def fragile(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Each test leaves it as it was: nobody has to start it again."""
    repo = fill_repo(tmp_path_factory.mktemp("fragile") / "repo", world.model)
    with (repo / "tensorrt_llm" / "1" / "model.py").open("a") as file:
        file.write(FAULTS)
    with served(repo, "--hang-timeout=15") as server:
        yield server


def wait_for_reports(server: Running) -> None:
    """Until each model's process has reported again: a server with one that does not is replaced."""
    state = server.state()
    folder, pids = Path(state["log"]).parent, models(state["server"]).values()

    def written() -> dict[int, int]:
        return {pid: report.written_ns for pid, report in read_reports(folder, pids).items()}

    wait_for("a report of each", lambda: len(written()) == len(MODELS))
    before = written()
    wait_for("new reports", lambda: all(written().get(pid, 0) > at for pid, at in before.items()))


TWO_MODELS = "postprocessing, tensorrt_llm_bls"  # in the same instant


@pytest.mark.parametrize("which", ["proxy", *extended("server", "preprocessing", "tensorrt_llm", TWO_MODELS)])
def test_killed_processes_are_replaced_every_client_hears_and_no_orphan_stays(
    fragile: Running, which: str
) -> None:
    server, before = fragile, processes(fragile)
    assert b"GOMP_SPINCOUNT=1000" in Path(f"/proc/{before['tensorrt_llm']}/environ").read_bytes()
    with streams(server, endless=True) as open_streams:
        for name in which.split(", "):
            os.kill(before[name], signal.SIGKILL)
        ends = open_streams.wait_for_ends(120)
    assert any(kind.startswith("error") for kind in ends.values()), "nothing was in flight"
    wait_for("the service is back", lambda: is_back(server, before["server"]))
    assert len(new_ids(ask(server, inputs()))) == len(PROMPT) + NEW
    old = [before[name] for name in (*MODELS, "server", *which.split(", "))]
    wait_for("no orphan", lambda: all(map(is_gone, old)))


def test_all_ends_with_a_killed_supervisor_and_the_next_start_works(fragile: Running) -> None:
    before = processes(fragile)
    assert shared_memory(fragile.http)
    with streams(fragile, endless=True) as open_streams:
        os.kill(before["supervisor"], signal.SIGKILL)
        ends = open_streams.wait_for_ends(120)
    assert {kind[:5] for kind in ends.values()} == {"error"}
    wait_for("the end of all", lambda: all(map(is_gone, before.values())))
    assert fragile.state()["reason"] == "the supervisor was killed"
    assert fragile.launch("--stop").stdout.startswith("no server was launched")
    assert not shared_memory(fragile.http)
    fragile.start("--hang-timeout=15")
    assert len(new_ids(ask(fragile, inputs()))) == len(PROMPT) + NEW


def starting(supervisor: int) -> dict[str, int]:
    """The models' processes of the server that the supervisor starts now, and the server."""
    for pid in children(supervisor):
        if found := models(pid):
            return found | {"server": pid}
    return {}


def test_what_is_killed_while_it_restarts_is_started_again(fragile: Running) -> None:
    before = processes(fragile)
    with fragile.held():
        with streams(fragile, endless=True) as open_streams:
            os.kill(before["tensorrt_llm"], signal.SIGKILL)
            ends = open_streams.wait_for_ends(120)
        assert any(kind.startswith("error") for kind in ends.values()), "nothing was in flight"
        wait_for("the old server is gone", lambda: is_gone(before["server"]))
        wait_for("the new model's process", lambda: "tensorrt_llm" in starting(before["supervisor"]))
        os.kill(starting(before["supervisor"])["tensorrt_llm"], signal.SIGKILL)

    def reason() -> str:
        return fragile.state().get("reason", "")

    # Long before the start timeout, 300 s.
    wait_for("the reason", lambda: "(try 1 after: tensorrt_llm's process ended" in reason())
    told = reason()  # as the launcher sees it, or as tritonserver says it, whoever is first
    assert " ended with signal 9 while " in told or "is not healthy" in told
    wait_for("the service is back", lambda: is_back(fragile, before["server"]))
    assert len(new_ids(ask(fragile, inputs()))) == len(PROMPT) + NEW
    assert processes(fragile)["supervisor"] == before["supervisor"]
    wait_for("no orphan", lambda: all(is_gone(before[name]) for name in MODELS))


@pytest.mark.parametrize("which", ["server", *extended("postprocessing")])
def test_a_hung_process_is_replaced(fragile: Running, which: str) -> None:
    """One that a signal has stopped is found long before --hang-timeout."""
    before = processes(fragile)
    with streams(fragile, 4) as open_streams:
        os.kill(before[which], signal.SIGSTOP)
        open_streams.wait_for_ends(120)
    wait_for("the service is back", lambda: is_back(fragile, before["server"]))
    assert len(new_ids(ask(fragile, inputs()))) == len(PROMPT) + NEW


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where temporary files go, with room for 8 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a file system of its own cannot be mounted: {mounted.stderr.decode().strip()}")
    monkeypatch.setenv("TMPDIR", str(disk))
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.mark.extended
def test_a_full_disk_ends_nothing_and_the_status_stays_true(
    world: World, tmp_path: Path, small_disk: Path
) -> None:
    full = new_server(fill_repo(tmp_path / "repo", world.model))
    full.start()
    try:
        before = processes(full)
        with (
            (small_disk / "rubbish").open("wb", buffering=0) as rubbish,
            pytest.raises(OSError, match="No space left"),
        ):
            while True:
                rubbish.write(bytes(4096))
        assert shutil.disk_usage(small_disk).free == 0
        wait_for_reports(full)
        assert processes(full) == before
        os.kill(before["server"], signal.SIGKILL)
        wait_for("the truth", lambda: full.launch("--status").returncode == 1)
        wait_for("the service is back", lambda: is_back(full, before["server"]))
        wait_for_reports(full)
        assert full.state()["restarts"] == 1
        assert len(new_ids(ask(full, inputs()))) == len(PROMPT) + NEW
    finally:
        stopped = full.launch("--stop")
    assert stopped.returncode == 0, stopped.stderr
    assert [path.name for path in small_disk.iterdir()] == ["rubbish"]


@pytest.mark.parametrize(("token", "reason"), [(13, "ended with status 1"), (14, "has not moved")])
def test_an_engine_thread_that_dies_or_is_stuck_is_replaced(
    fragile: Running, token: int, reason: str
) -> None:
    state = fragile.state()
    log = Path(state["log"]).with_name("supervisor.log")
    written = log.stat().st_size
    heard: queue.SimpleQueue = queue.SimpleQueue()
    with ExitStack() as stack:
        for _ in range(3):
            client = stack.enter_context(grpc.InferenceServerClient(f"127.0.0.1:{fragile.grpc}"))
            client.start_stream(lambda result, error: heard.put(error))
            client.async_stream_infer("tensorrt_llm", inputs([token, 5, 6], 50))
        errors = [str(heard.get(timeout=120)) for _ in range(3)]
    assert "None" not in errors
    assert token == 14 or any("The engine stopped: MemoryError" in error for error in errors)
    wait_for("the service is back", lambda: is_back(fragile, state["server"]))
    assert len(new_ids(ask(fragile, inputs()))) == len(PROMPT) + NEW
    assert reason in log.read_text()[written:]
