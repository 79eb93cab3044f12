"""The service that the launcher supervises: a tritonserver that is restarted on the same ports."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from manylora.launcher.installation import Installation
from manylora.launcher.logs import limit_size
from manylora.launcher.processes import port_is_free
from manylora.launcher.server import TritonServer
from manylora.launcher.server_command import ServerOptions, remove_leftovers
from manylora.launcher.supervisor import StoppedError

FAILED = "failed"  # file with the reason why the service was given up
PORTS_S = 10.0


class InRunDirectory:
    """run_dir: logs, marks, reports and the backend directory. It is removed when the service is stopped."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def tidy(self) -> None:
        for name in ("server.log", "supervisor.log"):
            limit_size(self._run_dir / name)

    def close(self, reason: str | None) -> None:
        if reason is None:
            shutil.rmtree(self._run_dir, ignore_errors=True)
        else:
            with suppress(OSError):
                (self._run_dir / FAILED).write_text(reason, encoding="utf-8")


class TritonService(InRunDirectory):
    """A tritonserver that is restarted when it is lost."""

    def __init__(self, installation: Installation, options: ServerOptions, run_dir: Path) -> None:
        super().__init__(run_dir)
        self._installation = installation
        self._options = options
        self._server: TritonServer | None = None

    def start(self, stopping: Callable[[], bool]) -> None:
        self._wait_for_ports(stopping)
        self._server = TritonServer(self._installation, self._options, self._run_dir)
        self._server.wait_ready(stopping)

    def loss(self) -> str | None:
        return self._server.loss() if self._server else None

    def processes(self) -> list[int]:
        return self._server.pids if self._server else [0]

    def stop(self, hurry: Callable[[], bool]) -> None:
        if self._server:
            self._server.drain(hurry)
            self._server.stop()
        self.kill()

    def kill(self) -> None:
        if self._server:
            self._server.kill()
        remove_leftovers(self._run_dir, self._options.http_port)

    def _wait_for_ports(self, stopping: Callable[[], bool]) -> None:
        """Wait for free ports: a killed server may hold them a moment longer."""
        o, deadline = self._options, time.monotonic() + PORTS_S
        while time.monotonic() < deadline and not all(
            port_is_free(port, o.address) for port in (o.http_port, o.grpc_port, o.metrics_port)
        ):
            if stopping():
                raise StoppedError
            time.sleep(0.1)
