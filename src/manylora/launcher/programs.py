"""Supervised services that are one program: `manylora serve`, and a rank of an engine whose tritonserver runs
on another host.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from manylora.errors import ConfigError
from manylora.group.rank_info import RANK_0_GONE
from manylora.launcher.logs import open_log
from manylora.launcher.probes import STOPPED_S
from manylora.launcher.processes import end_marked, exit_text, kill_child, spawn, stat_of
from manylora.launcher.run_directory import RunDirectory
from manylora.launcher.supervisor import POLL_S, StoppedError, wait_for_ports
from manylora.system.lifeline import RUN_DIR, WORLD_SIZE

logger = logging.getLogger("manylora.launcher")

MARK = "MANYLORA_KEPT_BY"
FOLLOWER = "manylora.engine.repository_rank"
REPORT_BYTES = 4096


class Program:
    """name: for messages. mark: environment variable by which its processes are found. stop_s: how long it
    may take to exit.
    """

    def __init__(self, name: str, command: Sequence[str], mark: tuple[str, str], stop_s: float) -> None:
        self._name, self._command, self._mark, self._stop_s = name, command, mark, stop_s
        self._process: subprocess.Popen | None = None

    def loss(self) -> str | None:
        code = self._process.poll() if self._process else None
        return None if code is None else f"{self._name} ended with {exit_text(code)}"

    def processes(self) -> list[int]:
        return [self._process.pid if self._process else 0]

    def stop(self, hurry: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self._stop_s
        while self._process and self._process.poll() is None and time.monotonic() < deadline and not hurry():
            time.sleep(0.05)
        self.kill()

    def kill(self) -> None:
        kill_child(self._process)
        end_marked(*self._mark)

    def _environment(self) -> Mapping[str, str]:
        return os.environ | dict([self._mark])


class ServeProgram(Program):
    """`manylora serve`, or any other program that listens on a port."""

    def __init__(self, command: Sequence[str], address: str, port: int, stop_s: float) -> None:
        super().__init__("the server", command, (MARK, f"{os.getpid()}.{time.time_ns()}"), stop_s)
        self._address, self._port = address, port

    def start(self, stopping: Callable[[], bool]) -> None:
        """Start it and wait until it listens. Loading may take any time."""
        wait_for_ports(self._address, [self._port], stopping)
        self._process = spawn(self._command, self._environment())
        while not self._listens():
            if stopping():
                raise StoppedError
            if (loss := self.loss()) is not None:
                refused = self._process.returncode > 0
                raise ConfigError(loss) if refused else RuntimeError(f"{loss} while starting")
            time.sleep(POLL_S)

    def stop(self, hurry: Callable[[], bool]) -> None:
        if self._process:
            self._process.terminate()
        super().stop(hurry)

    def _listens(self) -> bool:
        # Connecting works for wildcard addresses such as 0.0.0.0, too.
        with suppress(OSError), socket.create_connection((self._address, self._port), timeout=1):
            return True
        return False


class FollowerProgram(Program):
    """One rank of the engine in a tritonserver elsewhere. It is restarted with that server.

    stop_s: how long rank 0, which needs this rank to finish its work, may take to exit once this host is
    told to stop: usually both are.
    """

    def __init__(
        self, repo: Path, world_size: int | None, run_dir: RunDirectory, stop_s: float, hang_timeout: float
    ) -> None:
        command, mark = [sys.executable, "-m", FOLLOWER, str(repo)], (RUN_DIR, str(run_dir.path))
        super().__init__(f"rank {run_dir.rank}", command, mark, stop_s)
        self._world_size, self._run_dir, self._hang_timeout = world_size, run_dir, hang_timeout
        self._stopped_since: float | None = None

    def start(self, stopping: Callable[[], bool]) -> None:
        """Wait until rank 0 was found and this rank has loaded its part. Loading may take any time."""
        heard, report = os.pipe()
        os.set_blocking(heard, False)
        try:
            try:
                self._spawn(report)
            finally:
                os.close(report)
            while (said := _read(heard)) is None:
                if stopping():
                    raise StoppedError
                if (loss := self.loss()) is not None:
                    said = _read(heard)
                    if said is None:
                        raise RuntimeError(f"{loss} while starting")
                    break
                time.sleep(POLL_S)
            if said:
                raise ConfigError(said)
        finally:
            os.close(heard)

    def loss(self) -> str | None:
        if self._process is None:
            return None
        if (code := self._process.poll()) == 0:
            logger.info("rank 0 has ended for good, and %s with it", self._name)
            raise StoppedError
        if code is not None:
            return "rank 0 is gone" if code == RANK_0_GONE else super().loss()
        fields, now = stat_of(self._process.pid), time.monotonic()
        if not self._hang_timeout or fields is None or fields[0] != "T":
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = now
        elif now - self._stopped_since > min(self._hang_timeout, STOPPED_S):
            return f"{self._name} was stopped by a signal"
        return None

    def _spawn(self, report: int) -> None:
        environment = dict(self._environment())
        if self._world_size is not None:
            environment[WORLD_SIZE] = str(self._world_size)
        log = open_log(self._run_dir.log)
        self._stopped_since = None
        try:
            self._process = spawn([*self._command, str(report)], environment, log, pass_fds=(report,))
        finally:
            os.close(log)


def _read(heard: int) -> str | None:
    """The process's report: why it does not start, or empty once it has loaded its part. None: no report
    yet.
    """
    try:
        text = os.read(heard, REPORT_BYTES).decode(errors="replace")
    except BlockingIOError:
        return None
    return text.strip() if text else None
