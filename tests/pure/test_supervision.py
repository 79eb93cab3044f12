"""Protects those whose service must come back, and their other processes: the kernel is asked who is who, a
start that fails is tried again for as long as it was said, logs stay small."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from waiting import wait_for_named as wait_for

from manylora.doors.triton.launcher import supervisor as supervisor_module
from manylora.doors.triton.launcher.processes import end_marked, stat_of
from manylora.doors.triton.launcher.run_directory import RunDirectory, limit_size, open_log
from manylora.doors.triton.launcher.server import MemoryLimit, Silence
from manylora.doors.triton.launcher.supervisor import StoppedError, Supervisor
from manylora.errors import ConfigError
from manylora.system import lifeline
from manylora.system.compiler import load_library
from manylora.system.lifeline import RUN_DIR


class Scripted:
    """A service whose starts end as told: an exception, or what is lost afterwards (None: nothing)."""

    def __init__(self, *starts: Exception | str | None) -> None:
        self._starts = list(starts)
        self._loss: str | None = None
        self.calls: list[str] = []

    def start(self, stopping: Callable[[], bool]) -> None:
        self.calls.append("start")
        if not self._starts:
            os.kill(os.getpid(), signal.SIGTERM)
            raise StoppedError
        outcome = self._starts.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        self._loss = outcome

    def loss(self) -> str | None:
        if self._loss is None:
            os.kill(os.getpid(), signal.SIGTERM)
        return self._loss

    def processes(self) -> list[int]:
        return [1234]

    def stop(self, hurry: Callable[[], bool]) -> None:
        self.calls.append("stop")

    def kill(self) -> None:
        self.calls.append("kill")


def kept(
    monkeypatch: pytest.MonkeyPatch, *starts: Exception | str | None, tries: int | None = None
) -> tuple[int, dict, list[str], list[float]]:
    """What a supervisor returned, said last, called, and how long it paused before each further try."""
    pauses: list[float] = []
    monkeypatch.setattr(Supervisor, "_sleep", lambda _, seconds: pauses.append(seconds))
    monkeypatch.setattr(supervisor_module, "POLL_S", 0)
    service = Scripted(*starts)
    supervisor = Supervisor(service, tries)
    before = {name: signal.getsignal(name) for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        code = supervisor.run()
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
    return code, supervisor.status, service.calls, pauses


def test_a_restart_that_fails_is_tried_again_for_ever_with_growing_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failures = [
        ConfigError("refused"),
        RuntimeError("crashed"),
        OSError(28, "No space left"),
        TimeoutError("slow"),
    ]
    code, said, calls, pauses = kept(monkeypatch, "it was killed", *failures, *failures, None)
    assert (code, calls.count("start"), calls[-1]) == (0, 10, "stop")
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]
    assert (said["restarts"], said["last_loss"]) == (1, "it was killed")


def test_a_restart_is_given_up_after_as_many_failures_as_were_said(monkeypatch: pytest.MonkeyPatch) -> None:
    code, said, calls, _ = kept(
        monkeypatch, "killed", *[RuntimeError(f"crash {i}") for i in range(9)], tries=3
    )
    assert (code, said["state"], calls.count("start")) == (1, "failed", 4)
    assert said["reason"] == "given up after 3 failed starts, the last: crash 2"
    assert kept(monkeypatch, "killed", None, tries=0)[1]["reason"] == "killed"


def test_a_first_start_that_is_refused_ends_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    code, said, calls, _ = kept(monkeypatch, ConfigError("a parameter is wrong"))
    assert (code, said["reason"], calls.count("start")) == (1, "a parameter is wrong", 1)
    crashes = [RuntimeError("crashed")] * 3
    assert kept(monkeypatch, *crashes)[1]["reason"] == "crashed"
    assert kept(monkeypatch, *crashes[:2], None)[0] == 0


SUPERVISE = """
import sys
from manylora.doors.triton.launcher.run_directory import RunDirectory
run_dir = RunDirectory(int(sys.argv[1]))
run_dir.claim()
run_dir.prepare()
run_dir.supervise()
run_dir.write_state({"state": "ready", "reason": ""})
print("supervises", flush=True)
sys.stdin.read()
"""


def test_the_kernel_says_who_supervises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    run_dir = RunDirectory(8000)
    assert (run_dir.supervisor(), run_dir.status()) == (0, {})
    with subprocess.Popen(
        [sys.executable, "-c", SUPERVISE, "8000"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "supervises\n"
        log = str(run_dir.path / "server.log")
        assert run_dir.status() == {"state": "ready", "reason": "", "supervisor": other.pid, "log": log}
        with pytest.raises(ConfigError, match=rf"runs already for this port \(process {other.pid}\): end it"):
            run_dir.claim()
        other.kill()
    killed = {"state": "failed", "reason": "the supervisor was killed", "log": log}
    assert (run_dir.supervisor(), run_dir.status()) == (0, killed)
    run_dir.claim()
    run_dir.prepare()
    assert run_dir.status() == {}
    run_dir.remove()
    assert not run_dir.path.exists()


def test_leftovers_are_known_by_their_environment_alone() -> None:
    mine, other = ({"MANYLORA_TEST_MARK": f"{os.getpid()}{suffix}"} for suffix in ("", "0"))
    with (
        subprocess.Popen(["sleep", "600"], env=mine) as left,
        subprocess.Popen(["sleep", "600"], env=other) as stranger,
    ):
        left.send_signal(signal.SIGSTOP)
        end_marked("MANYLORA_TEST_MARK", mine["MANYLORA_TEST_MARK"])
        state = stat_of(left.pid)
        assert state is None or state[0] in "ZX"
        assert stranger.poll() is None
        stranger.kill()


def test_a_log_keeps_its_last_bytes_and_who_writes_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    log = open_log(path)
    for line in range(1000):
        os.write(log, b"line %03d\n" % line)
    limit_size(path, limit=900)
    os.write(log, b"after\n")
    os.close(log)
    assert path.read_bytes() == b"after\n"
    assert (tmp_path / "server.log.1").read_bytes() == b"".join(b"line %03d\n" % i for i in range(900, 1000))
    assert path.stat().st_mode & 0o077 == 0


def test_a_process_whose_server_is_gone_when_it_begins_ends_at_once(tmp_path: Path) -> None:
    begin = "from manylora.system.lifeline import Lifeline; Lifeline('m'); print('lives')"
    environment = os.environ | {RUN_DIR: str(tmp_path)}
    orphan = subprocess.run([sys.executable, "-c", begin], env=environment, capture_output=True, check=False)
    assert (orphan.returncode, orphan.stdout) == (1, b"")
    # A shell that has the same run directory stands for the server.
    shell = ["sh", "-c", f'{sys.executable} -c "{begin}"; exit $?']
    child = subprocess.run(shell, env=environment, capture_output=True, check=False)
    assert (child.returncode, child.stdout) == (0, b"lives\n")


STUCK = """
import ctypes
from manylora.system.lifeline import Lifeline
Lifeline("m")
print("lives", flush=True)
ctypes.PyDLL(None).pause()  # it keeps Python's lock
"""


def test_a_process_that_waits_for_its_server_with_pythons_lock_held_ends_with_it(tmp_path: Path) -> None:
    if load_library(lifeline.SOURCE) is None:
        pytest.skip("no compiler, or MANYLORA_NATIVE=0")
    script = tmp_path / "stuck.py"
    script.write_text(STUCK)
    shell = ["sh", "-c", f"echo $$; {sys.executable} {script}; exit $?"]  # it stands for the server
    environment = os.environ | {RUN_DIR: str(tmp_path)}
    with subprocess.Popen(shell, env=environment, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert (server.stdout.readline(), server.stdout.readline()) == (f"{server.pid}\n", "lives\n")
        task = Path(f"/proc/{server.pid}/task/{server.pid}/children")
        (stuck,) = map(int, task.read_text().split())
        server.kill()
        try:
            wait_for("its end", lambda: not Path(f"/proc/{stuck}").exists())
        finally:
            with suppress(ProcessLookupError):
                os.kill(stuck, signal.SIGKILL)


def test_a_server_that_has_grown_is_started_anew_in_a_quiet_moment() -> None:
    limit, over = MemoryLimit(100 << 20), 150 << 20
    assert limit.exceeded(90 << 20, 0, 0.0) is None
    assert limit.exceeded(over, 3, 1.0) is None, "requests are open"
    assert limit.exceeded(over, 0, 2.0) is None and limit.exceeded(over, 0, 3.9) is None
    assert limit.exceeded(over, 1, 4.0) is None and limit.exceeded(over, 0, 5.0) is None, "quiet anew"
    assert limit.exceeded(over, 0, 7.1) == "tritonserver holds 150 MiB, of at most 100"
    assert limit.exceeded(201 << 20, 9, 8.0) is not None, "twice as much is not waited with"
    assert MemoryLimit(0).exceeded(1 << 40, 0, 0.0) is None


@pytest.mark.parametrize(
    ("used_per_s", "limit", "hangs_after"),
    [(0.0, 60, 30), (0.005, 60, 30), (0.005, 15, 15), (0.1, 60, 300), (4.0, 60, 300), (4.0, 15, 150)],
)
def test_a_silent_server_hangs_sooner_if_it_does_not_compute(
    used_per_s: float, limit: float, hangs_after: int
) -> None:
    silence = Silence(0.0)
    assert silence.of(True, 100.0, 5.0, limit) is None
    found = [silence.of(False, 100.0 + used_per_s * t, 5.0 + t, limit) for t in range(1, 400)]
    assert found[:hangs_after] == [None] * hangs_after
    assert found[hangs_after] == hangs_after + 1
