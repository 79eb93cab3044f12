"""The service on a host without rank 0: a process that is one rank of the engine in a tritonserver elsewhere.
It is restarted with that server.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from manylora.errors import ConfigError
from manylora.group.place import RANK_0_GONE
from manylora.launcher.logs import open_log
from manylora.launcher.processes import end_marked, exit_text, kill_child, spawn, stat_of
from manylora.launcher.supervisor import StoppedError
from manylora.launcher.triton_service import InRunDirectory
from manylora.system.lifeline import RUN_DIR, WORLD_SIZE

logger = logging.getLogger("manylora.launcher")

COMMAND = "manylora.engine.repository_rank"
STOPPED_S = 5.0  # a process stopped by a signal for this long counts as hung
REPORT_BYTES = 4096


class FollowerService(InRunDirectory):
    """stop_s: how long rank 0 may take to exit once this host was told to stop: usually both are told."""

    def __init__(
        self, repo: Path, rank: int, world_size: int | None, run_dir: Path, stop_s: float, hang_timeout: float
    ) -> None:
        super().__init__(run_dir)
        self._repo, self._rank, self._world_size = repo, rank, world_size
        self._stop_s, self._hang_timeout = stop_s, hang_timeout
        self._process: subprocess.Popen | None = None
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
                time.sleep(0.1)
            if said:
                raise ConfigError(said)
        finally:
            os.close(heard)

    def loss(self) -> str | None:
        if self._process is None:
            return None
        code = self._process.poll()
        if code == 0:
            logger.info("rank 0 has ended for good, and rank %d with it", self._rank)
            raise StoppedError
        if code is not None:
            ended = f"rank {self._rank} ended with {exit_text(code)}"
            return "rank 0 is gone" if code == RANK_0_GONE else ended
        fields, now = stat_of(self._process.pid), time.monotonic()
        if not self._hang_timeout or fields is None or fields[0] != "T":
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = now
        elif now - self._stopped_since > min(self._hang_timeout, STOPPED_S):
            return f"rank {self._rank} was stopped by a signal"
        return None

    def processes(self) -> list[int]:
        return [self._process.pid if self._process else 0]

    def stop(self, hurry: Callable[[], bool]) -> None:
        """Wait for rank 0: it needs this rank to finish its work."""
        deadline = time.monotonic() + self._stop_s
        while self._process and self._process.poll() is None and time.monotonic() < deadline and not hurry():
            time.sleep(0.05)
        self.kill()

    def kill(self) -> None:
        kill_child(self._process)
        end_marked(RUN_DIR, str(self._run_dir))

    def _spawn(self, report: int) -> None:
        environment = os.environ | {RUN_DIR: str(self._run_dir)}
        if self._world_size is not None:
            environment[WORLD_SIZE] = str(self._world_size)
        log = open_log(self._run_dir / "server.log")
        command = [sys.executable, "-m", COMMAND, str(self._repo), str(report)]
        self._stopped_since = None
        try:
            self._process = spawn(command, environment, log, pass_fds=(report,))
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
