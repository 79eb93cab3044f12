"""Supervisor: the loop that starts, watches, restarts and stops one service of any kind, and the services
that are one program: `manylora serve`, and a rank of an engine whose tritonserver runs on another host.

Nothing restarts a supervisor that is killed, except a service manager. All that it has started ends with it.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from manylora.doors.triton.launcher import processes
from manylora.doors.triton.launcher.run_directory import LOGS, RunDirectory, limit_size, open_log
from manylora.errors import ConfigError
from manylora.ranks.rank_info import RANK_0_GONE
from manylora.system.connections import answers_at
from manylora.system.lifeline import RUN_DIR, WORLD_SIZE

logger = logging.getLogger("manylora.launcher")

START_TRIES = 3  # attempts if the first start crashes; a refused start is final
POLL_S = 0.1
TIDY_S = 0.5
PORTS_S = 10.0
FIRST_PAUSE_S = 1.0
LAST_PAUSE_S = 30.0
REASON = 2000  # characters
MARK = "MANYLORA_KEPT_BY"
FOLLOWER = "manylora.engine.follower"
REPORT_BYTES = 4096


class StoppedError(Exception):
    """A start was interrupted by a signal, or the service has done its work."""


class Service(Protocol):
    """What a Supervisor starts and stops. `processes`: their ids, the main one first.

    start: returns when it is ready; calls `stopping` several times a second. Raises ConfigError if it
    refuses, RuntimeError if it crashed, TimeoutError, StoppedError if `stopping` returned True.
    loss: the reason why it has to be restarted, or None. Raises StoppedError if it has ended for good.
    stop: let it finish its work, until `hurry` returns True after a second signal; then kill it.
    kill: at once, with anything that may be left of it.
    """

    def start(self, stopping: Callable[[], bool]) -> None: ...
    def loss(self) -> str | None: ...
    def processes(self) -> list[int]: ...
    def stop(self, hurry: Callable[[], bool]) -> None: ...
    def kill(self) -> None: ...


class Supervisor:
    """tries: failed restarts in a row after which the service is given up. 0: never restart; None: never give
    up. run_dir: gets the status and logs. last_signal: the number of the signal that stopped it; 0: none.
    """

    def __init__(
        self, service: Service, tries: int | None = None, run_dir: RunDirectory | None = None
    ) -> None:
        self._service, self._tries, self._run_dir = service, tries, run_dir
        self._signals, self._tidied = 0, 0.0
        self.last_signal = 0
        self.status: dict[str, Any] = {"state": "starting", "reason": "", "server": 0}
        self.status |= {"processes": [], "restarts": 0, "last_loss": ""}

    def run(self) -> int:
        """Run until a signal, or until the service is given up, and return the exit status: 0 or 1."""
        for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if name != signal.SIGHUP or signal.getsignal(name) != signal.SIG_IGN:  # nohup
                signal.signal(name, self._on_signal)
        if self._run_dir is not None:
            self._run_dir.supervise()
        self._tell()
        try:
            self._start_first()
            while (loss := self._watch()) is not None:
                logger.warning("%s: ending the service so that every client hears of it", loss)
                self._service.kill()
                self._start_again(loss)
            self._tell(state="stopping", server=0)
            self._service.stop(lambda: self._signals > 1)
        except StoppedError:
            self._tell(state="stopping", server=0)
            self._service.kill()
        except ConfigError as error:
            self._service.kill()
            self._tell(state="failed", reason=str(error), server=0, processes=[])
            return 1
        return 0

    def _tell(self, **changes: Any) -> None:
        self.status |= {k: v[:REASON] if isinstance(v, str) else v for k, v in changes.items()}
        if self._run_dir is not None:
            self._run_dir.write_state(self.status)

    def _on_signal(self, number: int, _: object) -> None:
        self._signals, self.last_signal = self._signals + 1, number

    def _stopping(self) -> bool:
        """Whether a signal came. This is called all the time, so regular work is done here, too."""
        if self._run_dir is not None and time.monotonic() - self._tidied > TIDY_S:
            self._tidied = time.monotonic()
            for name in LOGS:
                limit_size(self._run_dir.path / name)
        return self._signals > 0

    def _watch(self) -> str | None:
        while not self._stopping():
            if (loss := self._service.loss()) is not None:
                return loss
            time.sleep(POLL_S)
        return None

    def _start_first(self) -> None:
        for attempt in range(1, START_TRIES + 1):
            try:
                self._start()
                return
            except TimeoutError as error:
                raise ConfigError(str(error)) from error
            except (RuntimeError, OSError) as error:
                self._service.kill()
                if attempt == START_TRIES:
                    raise ConfigError(str(error)) from error
                logger.warning("%s; trying again", error)

    def _start_again(self, loss: str) -> None:
        if self._tries == 0:
            raise ConfigError(loss)
        restarts = self.status["restarts"] + 1
        self._tell(state="restarting", reason=loss, last_loss=loss, restarts=restarts, server=0, processes=[])
        pause, failed = FIRST_PAUSE_S, 0
        while True:
            try:
                self._start()
                return
            except (ConfigError, RuntimeError, OSError) as error:
                self._service.kill()
                failed += 1
                if failed == self._tries:
                    raise ConfigError(f"given up after {failed} failed starts, the last: {error}") from error
                self._tell(reason=f"{error} (try {failed} after: {loss})", processes=[])
                logger.warning("%s; next try in %.0f s", error, pause)
                self._sleep(pause)
                pause = min(2 * pause, LAST_PAUSE_S)

    def _start(self) -> None:
        if self._stopping():
            raise StoppedError
        self._service.start(self._stopping)
        pids = self._service.processes()
        self._tell(state="ready", reason="", server=pids[0], processes=pids)

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self._stopping():
                raise StoppedError
            time.sleep(POLL_S)


def wait_for_ports(address: str, ports: Iterable[int], stopping: Callable[[], bool]) -> None:
    """Return when they are free: a killed server may hold them a moment longer.

    Raises ConfigError if one stays in use, StoppedError if `stopping` returned True.
    """
    deadline = time.monotonic() + PORTS_S
    for port in ports:
        while processes.why_taken(port, address) is not None:
            if stopping():
                raise StoppedError
            if time.monotonic() > deadline:
                raise ConfigError(f"port {port} is in use: stop what listens there or choose another")
            time.sleep(POLL_S)


class Program:
    """mark: environment variable by which its processes are found. stop_s: how long it may take to exit."""

    def __init__(self, name: str, command: Sequence[str], mark: tuple[str, str], stop_s: float) -> None:
        self._name, self._command, self._mark, self._stop_s = name, command, mark, stop_s
        self._process: subprocess.Popen | None = None

    def loss(self) -> str | None:
        code = self._process.poll() if self._process else None
        return None if code is None else f"{self._name} ended with {processes.exit_text(code)}"

    def processes(self) -> list[int]:
        return [self._process.pid if self._process else 0]

    def stop(self, hurry: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self._stop_s
        while self._process and self._process.poll() is None and time.monotonic() < deadline and not hurry():
            time.sleep(0.05)
        self.kill()

    def kill(self) -> None:
        processes.kill_child(self._process)
        processes.end_marked(*self._mark)


class ServeProgram(Program):
    """`manylora serve`, or any other program that listens on a port, or on the Unix socket `uds`."""

    def __init__(
        self, command: Sequence[str], address: str, port: int, stop_s: float, uds: Path | None = None
    ) -> None:
        super().__init__("the server", command, (MARK, f"{os.getpid()}.{time.time_ns()}"), stop_s)
        self._address, self._port, self._uds = address, port, uds

    def start(self, stopping: Callable[[], bool]) -> None:
        """Start it and wait until it listens. Loading may take any time."""
        if self._uds is None:
            wait_for_ports(self._address, [self._port], stopping)
        elif answers_at(self._uds):
            raise ConfigError(f"another server listens on --uds {self._uds}: give another path")
        self._process = processes.spawn(self._command, os.environ | dict([self._mark]))
        while not self._listens():
            if stopping():
                raise StoppedError
            if (loss := self.loss()) is not None:
                refused = self._process.returncode > 0
                raise ConfigError(loss) if refused else RuntimeError(f"{loss} while starting")
            time.sleep(POLL_S)

    def _listens(self) -> bool:
        if self._uds is not None:
            return answers_at(self._uds)
        # Connecting works for wildcard addresses such as 0.0.0.0, too.
        with suppress(OSError), socket.create_connection((self._address, self._port), timeout=1):
            return True
        return False

    def stop(self, hurry: Callable[[], bool]) -> None:
        if self._process:
            self._process.terminate()
        super().stop(hurry)


class FollowerProgram(Program):
    """One rank of the engine in a tritonserver elsewhere. It is restarted with that server. stop_s: how long
    rank 0, which needs this rank to finish its work, may take to exit: usually both are told to.
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
        environment = os.environ | dict([self._mark])
        if self._world_size is not None:
            environment[WORLD_SIZE] = str(self._world_size)
        self._stopped_since = None
        try:
            log = open_log(self._run_dir.log)
            try:
                self._process = processes.spawn(
                    [*self._command, str(report)], environment, log, pass_fds=(report,)
                )
            finally:
                os.close(report)
                os.close(log)
            loss = None
            while (said := _read(heard)) is None:
                if loss is not None:
                    raise RuntimeError(f"{loss} while starting")
                if stopping():
                    raise StoppedError
                loss = self.loss()
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
        fields, now = processes.stat_of(self._process.pid), time.monotonic()
        if not self._hang_timeout or fields is None or fields[0] != "T":
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = now
        elif now - self._stopped_since > min(self._hang_timeout, processes.STOPPED_S):
            return f"{self._name} was stopped by a signal"
        return None


def _read(heard: int) -> str | None:
    """The process's report: why it does not start, or empty once it has loaded. None: no report yet."""
    try:
        text = os.read(heard, REPORT_BYTES).decode(errors="replace")
    except BlockingIOError:
        return None
    return text.strip() if text else None
