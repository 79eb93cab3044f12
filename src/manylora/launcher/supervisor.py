"""Supervisor: the loop that starts, watches, restarts and stops one service of any kind.

Nothing else would restart the service if a supervisor is killed. A supervisor may therefore have deputies:
processes that only wait, one of which takes over when the supervisor is gone. The supervisor replaces
deputies that end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, Protocol

from manylora.errors import ConfigError
from manylora.launcher.processes import is_child
from manylora.launcher.roles import DEPUTIES, SUPERVISOR, Roles
from manylora.launcher.state import State

logger = logging.getLogger("manylora.launcher")

START_TRIES = 3  # attempts if the first start crashes; a refused start is final
POLL_S = 0.1
WATCH_S = 0.5
FIRST_PAUSE_S = 1.0
LAST_PAUSE_S = 30.0


class StoppedError(Exception):
    """A start was interrupted by a signal, or the service has done its work."""


class SupervisedService(Protocol):
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

    def tidy(self) -> None:
        """Called about twice a second."""

    def stop(self, hurry: Callable[[], bool]) -> None:
        """Let it finish its work, until `hurry` returns True after a second signal. Then end it."""

    def kill(self) -> None:
        """Kill it at once, with anything that an earlier supervisor may have left of it."""

    def close(self, reason: str | None) -> None:
        """Clean up. It will not be restarted: because of `reason`, or if None because it was stopped."""


class Supervisor:
    """deputies: number of processes that stand by. tries: failed restarts in a row after which the service is
    given up. 0: never restart; None: never give up.
    """

    def __init__(
        self,
        service: SupervisedService,
        roles: Roles,
        state: State,
        deputies: int = 0,
        tries: int | None = None,
    ) -> None:
        self._service = service
        self._roles = roles
        self._state = state
        self._wanted = DEPUTIES[:deputies]
        self._forked: dict[int, int] = {}  # role -> the process that will take it
        self._tries = tries
        self._signals = 0
        self.last_signal = 0
        self._last_care = 0.0

    def run(self) -> int:
        """Run until a signal (returns 0) or until the service is given up (returns 1). The state says why."""
        if not self._roles.take(SUPERVISOR):
            raise ConfigError(f"process {self._roles.holder(SUPERVISOR)} supervises this service already")
        return self._supervise(None)

    def _supervise(self, loss: str | None) -> int:
        """loss: what happened to the service before, if it was serving."""
        for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if name != signal.SIGHUP or signal.getsignal(name) != signal.SIG_IGN:  # nohup
                signal.signal(name, self._on_signal)
        failure = None
        try:
            if loss is None:
                self._start_first()
            else:
                self._start_again(loss)
            while (loss := self._watch()) is not None:
                logger.warning("%s: ending the service so that every client hears of it", loss)
                self._service.kill()
                self._start_again(loss)
            self._state.write(state="stopping", server=0)
            self._service.stop(lambda: self._signals > 1)
        except StoppedError:
            self._state.write(state="stopping", server=0)
            self._service.kill()
        except ConfigError as error:
            failure = str(error)
            self._service.kill()
            self._state.write(state="failed", reason=failure, server=0, processes=[])
        self._end_deputies()
        self._service.close(failure)
        return 0 if failure is None else 1

    def _on_signal(self, number: int, _: object) -> None:
        self._signals += 1
        self.last_signal = number

    def _stopping(self) -> bool:
        """Whether a signal came. This is called all the time, so regular work is done here, too."""
        if time.monotonic() - self._last_care > WATCH_S:
            self._last_care = time.monotonic()
            self._renew_deputies()
            self._service.tidy()
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
        restarts = self._state.read()["restarts"] + 1
        self._state.write(
            state="restarting", reason=loss, last_loss=loss, restarts=restarts, server=0, processes=[]
        )
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
                self._state.write(reason=f"{error} (try {failed} after: {loss})", processes=[])
                logger.warning("%s; next try in %.0f s", error, pause)
                self._sleep(pause)
                pause = min(2 * pause, LAST_PAUSE_S)

    def _start(self) -> None:
        if self._stopping():
            raise StoppedError
        self._service.start(self._stopping)
        pids = self._service.processes()
        self._state.write(state="ready", reason="", server=pids[0], processes=pids, served=True)

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self._stopping():
                raise StoppedError
            time.sleep(POLL_S)

    def _renew_deputies(self) -> None:
        for role in self._wanted:
            if self._roles.holder(role) or is_child(self._forked.get(role, 0)):
                continue
            try:
                pid = os.fork()
            except OSError as error:  # no resources for a process now; retried later
                logger.warning("a deputy could not be started: %s", error)
                return
            if pid == 0:
                self._stand_by(role)
            self._forked[role] = pid

    def _stand_by(self, role: int) -> NoReturn:
        """Body of a deputy: wait for the end of the supervisor, and take over. A supervisor that is told to
        stop ends its deputies first.
        """
        code = 1
        try:
            os.setsid()
            self._close_files()
            for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(name, signal.SIG_DFL)
            if not self._roles.take(role):
                os._exit(0)
            self._roles.wait(SUPERVISOR)
            self._roles.leave(role)
            self._forked, self._signals = {}, 0
            before = self._state.read()
            logger.warning("the supervisor was killed; process %d takes over", os.getpid())
            if before["state"] in ("stopping", "failed"):
                code = self._end_for(before)
            else:
                self._service.kill()
                code = self._supervise("the supervisor was killed" if before["served"] else None)
        except BaseException:
            logger.exception("a deputy failed")
        finally:
            os._exit(code)

    def _close_files(self) -> None:
        """Close inherited connections: one that the supervisor closes must really be closed."""
        keep = {0, 1, 2, self._state.fd, *self._roles.files}
        for fd in {int(path.name) for path in Path("/proc/self/fd").iterdir()} - keep:
            with contextlib.suppress(OSError):
                os.close(fd)

    def _end_for(self, before: dict) -> int:
        """Finish the shutdown of a supervisor that was killed during it."""
        self._service.kill()
        self._end_deputies()
        self._service.close(before["reason"] if before["state"] == "failed" else None)
        return 0

    def _end_deputies(self) -> None:
        while pids := {self._roles.holder(role) for role in DEPUTIES} - {0, -1} | {
            pid for pid in self._forked.values() if is_child(pid)
        }:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
