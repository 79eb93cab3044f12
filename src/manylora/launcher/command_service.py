"""A supervised service that is one program listening on a port."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from manylora.errors import ConfigError
from manylora.launcher.processes import end_marked, exit_text, kill_child, port_is_free, spawn
from manylora.launcher.supervisor import StoppedError

MARK = "MANYLORA_KEPT_BY"
PORT_S = 10.0


class CommandService:
    """stop_s: how long it may take to exit after SIGTERM."""

    def __init__(self, command: Sequence[str], address: str, port: int, stop_s: float) -> None:
        self._command = command
        self._place = (address, port)
        self._stop_s = stop_s
        self._mark = f"{os.getpid()}.{time.time_ns()}"
        self._process: subprocess.Popen | None = None

    def start(self, stopping: Callable[[], bool]) -> None:
        """Start it and wait until it listens. Loading may take any time."""
        deadline = time.monotonic() + PORT_S
        address, port = self._place
        while not port_is_free(port, address):  # a killed process may hold it a moment longer
            if stopping():
                raise StoppedError
            if time.monotonic() > deadline:
                raise ConfigError(f"port {port} is in use: stop what listens there or choose another")
            time.sleep(0.1)
        self._process = spawn(self._command, os.environ | {MARK: self._mark})
        while not self._listens():
            if stopping():
                raise StoppedError
            if (loss := self.loss()) is not None:
                refused = self._process.returncode > 0
                raise ConfigError(loss) if refused else RuntimeError(f"{loss} while starting")
            time.sleep(0.1)

    def loss(self) -> str | None:
        code = self._process.poll() if self._process else None
        return None if code is None else f"the server ended with {exit_text(code)}"

    def processes(self) -> list[int]:
        return [self._process.pid if self._process else 0]

    def tidy(self) -> None:
        """Nothing to do: it writes no files."""

    def stop(self, hurry: Callable[[], bool]) -> None:
        if self._process and self._process.poll() is None:
            self._process.terminate()
            deadline = time.monotonic() + self._stop_s
            while self._process.poll() is None and time.monotonic() < deadline and not hurry():
                time.sleep(0.05)
        self.kill()

    def kill(self) -> None:
        kill_child(self._process)
        end_marked(MARK, self._mark)

    def close(self, reason: str | None) -> None:
        """Nothing to do: it leaves nothing behind."""

    def _listens(self) -> bool:
        address, port = self._place
        # Connecting works for wildcard addresses such as 0.0.0.0, too.
        with suppress(OSError), socket.create_connection((address, port), timeout=1):
            return True
        return False
