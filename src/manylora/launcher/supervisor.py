"""Supervisor: the loop that starts, watches, restarts and stops one service of any kind.

Nothing restarts a supervisor that is killed, except a service manager. All that it has started ends with it.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from manylora.errors import ConfigError
from manylora.launcher.processes import why_taken
from manylora.launcher.run_directory import RunDirectory

logger = logging.getLogger("manylora.launcher")

START_TRIES = 3  # attempts if the first start crashes; a refused start is final
POLL_S = 0.1
TIDY_S = 0.5
PORTS_S = 10.0
FIRST_PAUSE_S = 1.0
LAST_PAUSE_S = 30.0
REASON = 2000  # characters


class StoppedError(Exception):
    """A start was interrupted by a signal, or the service has done its work."""


class Service(Protocol):
    """What a Supervisor starts and stops."""

    def start(self, stopping: Callable[[], bool]) -> None:
        """Start it, and return when it is ready. Calls `stopping` several times a second.

        Raises ConfigError if it refuses to start, RuntimeError if it crashed, TimeoutError if it took too
        long, StoppedError if `stopping` returned True.
        """

    def loss(self) -> str | None:
        """The reason why it has to be restarted, or None. Raises StoppedError if it has ended for good."""

    def processes(self) -> list[int]:
        """Ids of its processes, the main one first."""

    def stop(self, hurry: Callable[[], bool]) -> None:
        """Let it finish its work, until `hurry` returns True after a second signal. Then end it."""

    def kill(self) -> None:
        """Kill it at once, with anything that may be left of it."""


class Supervisor:
    """tries: failed restarts in a row after which the service is given up. 0: never restart; None: never give
    up. run_dir: gets the status, and its logs are kept small.

    status: what `--status` shows. last_signal: the number of the signal that stopped it; 0: none.
    """

    def __init__(
        self, service: Service, tries: int | None = None, run_dir: RunDirectory | None = None
    ) -> None:
        self._service = service
        self._tries = tries
        self._run_dir = run_dir
        self._signals = 0
        self._tidied = 0.0
        self.last_signal = 0
        self.status: dict[str, Any] = {
            "state": "starting",
            "reason": "",
            "server": 0,
            "processes": [],
            "restarts": 0,
            "last_loss": "",
        }

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
        self._signals += 1
        self.last_signal = number

    def _stopping(self) -> bool:
        """Whether a signal came. This is called all the time, so regular work is done here, too."""
        if self._run_dir is not None and time.monotonic() - self._tidied > TIDY_S:
            self._tidied = time.monotonic()
            self._run_dir.limit_logs()
        return self._signals > 0

    def _watch(self) -> str | None:
        """Return why the service has to be restarted, or None if it has to stop."""
        while not self._stopping():
            if (loss := self._service.loss()) is not None:
                return loss
            time.sleep(POLL_S)
        return None

    def _start_first(self) -> None:
        """Raises ConfigError if the service cannot work."""
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
        """Raises ConfigError if it is given up."""
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
        while why_taken(port, address) is not None:
            if stopping():
                raise StoppedError
            if time.monotonic() > deadline:
                raise ConfigError(f"port {port} is in use: stop what listens there or choose another")
            time.sleep(POLL_S)
