"""The loop that keeps one server alive: start, watch, restart, drain, stop.

Nothing else would start a server again whose supervisor is killed, so a supervisor in the background has a
deputy: a process that only waits, and takes over when the supervisor is gone. Each looks after the other.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

from manylora.errors import ConfigError
from manylora.launcher.find import find_tritonserver
from manylora.launcher.server import Options, Server, clear_leftovers, is_alive

__all__ = ["Supervisor", "read_state"]

logger = logging.getLogger("manylora.launcher")

STATE = "state.json"
START_TRIES = 3
WATCH_S = 0.5
STABLE_S = 60.0
MAX_BACKOFF_S = 30.0


class Supervisor:
    """run_dir holds the log, the drain mark, the backend directory and the state file; removed at the end.

    deputy: keep one. In the foreground whoever runs the launcher is that.
    """

    def __init__(self, options: Options, tritonserver: str | None, run_dir: Path, deputy: bool) -> None:
        self._options = options
        self._tritonserver = tritonserver
        self._run_dir = run_dir
        self._stop = threading.Event()
        self._backoff = 1.0
        self._wants_deputy = deputy
        self._deputy = 0

    def run(self) -> int:
        """Until a signal (0) or a start that cannot work (1); the state file says why."""
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, lambda *_: self._stop.set())
        self._write("starting")
        self._renew_deputy()
        try:
            self._installation = find_tritonserver(self._tritonserver, self._run_dir)
            return self._watch(self._start())
        except (ConfigError, RuntimeError) as error:
            self._write("failed", str(error))
            return 1
        finally:
            self._end_deputy()

    def _watch(self, server: Server) -> int:
        """Raises ConfigError when the service is lost for good."""
        while not self._stop.wait(WATCH_S):
            self._renew_deputy()
            loss = server.died() or server.hung()
            if loss is None:
                continue
            logger.warning("%s: ending the server so that every client hears of it", loss)
            server.kill()
            if not self._options.restart:
                raise ConfigError(loss)
            server = self._restart(loss)
        self._write("stopping")
        server.drain()
        server.stop()
        self._end_deputy()
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
            self._write("starting", pids=server.pids)
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
            self._write("ready", pids=server.pids)
            return server
        raise AssertionError("unreachable")

    def _renew_deputy(self) -> None:
        if not self._wants_deputy or (self._deputy and is_alive(self._deputy)):
            return
        if self._deputy:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._deputy, os.WNOHANG)
        chief = os.getpid()
        self._deputy = os.fork()
        if self._deputy == 0:
            self._stand_by(chief)

    def _stand_by(self, chief: int) -> None:
        """The deputy's life: wait for the chief's end, then be the chief, unless it ended in order."""
        code = 1
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            while is_alive(chief):
                time.sleep(WATCH_S / 2)
            state = read_state(self._run_dir)
            if state is None or state["state"] in ("failed", "stopping"):
                os._exit(0)
            logger.warning("the supervisor %d was killed; this process takes over", chief)
            clear_leftovers(state["processes"], self._options.http_port)
            self._deputy = 0
            code = self.run()
        except BaseException:
            logger.exception("the deputy failed")
        finally:
            os._exit(code)

    def _end_deputy(self) -> None:
        if self._deputy:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self._deputy, signal.SIGKILL)
                os.waitpid(self._deputy, 0)
            self._deputy = 0

    def _write(self, state: str, reason: str = "", pids: list[int] | None = None) -> None:
        pids = pids or []
        text = json.dumps(
            {
                "state": state,
                "reason": reason,
                "supervisor": os.getpid(),
                "server": pids[0] if pids and state == "ready" else 0,
                "processes": pids,
            }
        )
        fresh = self._run_dir / f"{STATE}.new"
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(self._run_dir / STATE)


def read_state(run_dir: Path) -> dict[str, Any] | None:
    """What the supervisor of a run directory last said of itself."""
    try:
        return json.loads((run_dir / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
