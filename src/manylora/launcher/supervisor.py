"""The loop that keeps one server alive: start, watch, restart, drain, stop."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import threading
import time
from pathlib import Path

from manylora.errors import ConfigError
from manylora.launcher.find import find_tritonserver
from manylora.launcher.server import Options, Server

__all__ = ["STATE", "Supervisor"]

logger = logging.getLogger("manylora.launcher")

STATE = "state.json"
START_TRIES = 3
WATCH_S = 0.5
STABLE_S = 60.0
MAX_BACKOFF_S = 30.0


class Supervisor:
    """run_dir holds the log, the drain mark, the backend directory and the state file; removed at the end."""

    def __init__(self, options: Options, tritonserver: str | None, run_dir: Path) -> None:
        self._options = options
        self._run_dir = run_dir
        self._stop = threading.Event()
        self._installation = find_tritonserver(tritonserver, run_dir)
        self._backoff = 1.0
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, lambda *_: self._stop.set())

    def run(self) -> int:
        """Until a signal (0) or a start that cannot work (1); the state file says why."""
        try:
            server = self._start()
        except (ConfigError, RuntimeError) as error:
            self._write("failed", str(error))
            return 1
        while not self._stop.wait(WATCH_S):
            loss = server.died()
            if loss is None:
                continue
            logger.warning("%s: ending the server so that every client hears of it", loss)
            server.kill()
            if not self._options.restart:
                self._write("failed", loss)
                return 1
            try:
                server = self._restart(loss)
            except ConfigError as error:
                self._write("failed", str(error))
                return 1
        self._write("stopping")
        server.drain()
        server.stop()
        shutil.rmtree(self._run_dir, ignore_errors=True)
        return 0

    def _restart(self, loss: str) -> Server:
        self._write("restarting", loss)
        while True:
            started = time.monotonic()
            try:
                return self._start()
            except RuntimeError as error:
                self._backoff = 1.0 if time.monotonic() - started > STABLE_S else self._backoff * 2
                logger.warning("%s; next try in %.0f s", error, min(self._backoff, MAX_BACKOFF_S))
                if self._stop.wait(min(self._backoff, MAX_BACKOFF_S)):
                    raise ConfigError("stopped while restarting") from error

    def _start(self) -> Server:
        """A start that crashes is tried again; one that is refused is final."""
        for attempt in range(1, START_TRIES + 1):
            server = Server(self._installation, self._options, self._run_dir)
            self._write("starting")
            try:
                server.wait_ready()
            except ConfigError:
                server.kill()
                raise
            except RuntimeError as error:
                server.kill()
                if attempt == START_TRIES or "not ready" in str(error):
                    raise
                logger.warning("%s; trying again", error)
                continue
            self._write("ready", server_pid=server.pid)
            return server
        raise AssertionError("unreachable")

    def _write(self, state: str, reason: str = "", server_pid: int = 0) -> None:
        fresh = self._run_dir / f"{STATE}.new"
        fresh.write_text(
            json.dumps({"state": state, "reason": reason, "supervisor": os.getpid(), "server": server_pid})
        )
        fresh.replace(self._run_dir / STATE)
