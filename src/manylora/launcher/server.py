"""One tritonserver process tree: its command, its readiness, its end."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from manylora.errors import ConfigError
from manylora.launcher.find import Installation
from manylora.lifeline import DRAIN_FILE, INFLIGHT_FILE, RUN_DIR

__all__ = ["Options", "Server", "is_alive", "port_is_free"]

PR_SET_PDEATHSIG = 1
EXIT_TIMEOUT_S = 5
libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Options:
    """What the user asked for."""

    model_repo: Path
    http_port: int
    grpc_port: int
    metrics_port: int
    address: str
    start_timeout: float
    drain_timeout: float
    restart: bool
    verbose_log: str | None
    triton_args: tuple[str, ...]


class Server:
    """Started by the constructor; `wait_ready` tells when it serves, `died` when a part of it is gone."""

    def __init__(self, installation: Installation, options: Options, run_dir: Path) -> None:
        self._options = options
        self._run_dir = run_dir
        self._prefix = f"manylora_{os.getpid()}_{options.http_port}_"
        self._stubs: set[int] = set()
        self.log = run_dir / "server.log"
        for name in (DRAIN_FILE, INFLIGHT_FILE):
            (run_dir / name).unlink(missing_ok=True)
        environment = installation.environment | {RUN_DIR: str(run_dir)}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command(installation),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                # No orphan if the supervisor is killed.
                preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> None:
        """Return when every model answers. Raises ConfigError when the server refuses, RuntimeError when it
        crashed or hangs."""
        deadline = time.monotonic() + self._options.start_timeout
        while time.monotonic() < deadline:
            code = self._process.poll()
            if code is not None:
                if code < 0:
                    raise RuntimeError(f"tritonserver ended with signal {-code} while starting")
                raise ConfigError(self._reason() or f"tritonserver ended with status {code} while starting")
            if self._get("/v2/health/ready") is not None and self._canary():
                self._stubs = set(self._children())
                return
            time.sleep(0.1)
        raise RuntimeError(
            f"tritonserver was not ready after {self._options.start_timeout:.0f} s: "
            + (self._reason() or "no reason logged")
        )

    def died(self) -> str | None:
        """Which part of the process tree is gone, if any."""
        if self._process.poll() is not None:
            return f"tritonserver ended with status {self._process.returncode}"
        lost = {pid for pid in self._stubs if not is_alive(pid)}  # the server never reaps them
        return f"the process {min(lost)} of a model is gone" if lost else None

    def drain(self) -> None:
        """Have new requests refused, and wait until nothing is in flight, at most the drain timeout."""
        (self._run_dir / DRAIN_FILE).touch()
        deadline = time.monotonic() + self._options.drain_timeout
        while time.monotonic() < deadline and not self.died():
            with contextlib.suppress(OSError, ValueError):
                draining, inflight = (self._run_dir / INFLIGHT_FILE).read_text(encoding="utf-8").split()
                if draining == "1" and inflight == "0":
                    break
            time.sleep(0.1)
        time.sleep(0.3)  # the last responses still go through postprocessing

    def stop(self) -> None:
        """End it in order, then by force, and clean up behind it."""
        children = set(self._children()) | self._stubs
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(EXIT_TIMEOUT_S + 3)
        self.kill(children)

    def kill(self, children: set[int] | None = None) -> None:
        children = set(self._children()) | self._stubs if children is None else children
        for pid in {self.pid, *children}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        for path in Path("/dev/shm").glob(f"{self._prefix}*"):
            path.unlink(missing_ok=True)

    def _command(self, installation: Installation) -> list[str]:
        o = self._options
        command = [str(installation.binary), "--model-repository", str(o.model_repo), *installation.arguments]
        for kind, port in (("http", o.http_port), ("grpc", o.grpc_port), ("metrics", o.metrics_port)):
            command += [f"--{kind}-port={port}", f"--{kind}-address={o.address}"]
        command += [
            "--disable-auto-complete-config",
            f"--backend-config=python,shm-region-prefix-name={self._prefix}",
            f"--exit-timeout-secs={EXIT_TIMEOUT_S}",
        ]
        if not Path("/dev/nvidiactl").exists():
            command += ["--pinned-memory-pool-byte-size=0", "--allow-gpu-metrics=false"]
        if o.verbose_log:
            command += ["--log-verbose=3", f"--log-file={o.verbose_log}"]
        return command + list(o.triton_args)

    def _children(self) -> Iterator[int]:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{self.pid}/task").iterdir():
                with contextlib.suppress(OSError):
                    yield from map(int, (task / "children").read_text(encoding="utf-8").split())

    def _canary(self) -> bool:
        """One token through the ensemble, where there is one."""
        if not (self._options.model_repo / "ensemble").is_dir():
            return True
        body = json.dumps({"text_input": "a", "max_tokens": 1}).encode()
        return self._get("/v2/models/ensemble/generate", body) is not None

    def _get(self, path: str, body: bytes | None = None) -> bytes | None:
        host = "127.0.0.1" if self._options.address == "0.0.0.0" else self._options.address
        try:
            with urllib.request.urlopen(f"http://{host}:{self._options.http_port}{path}", body, 30) as answer:
                return answer.read()
        except (urllib.error.URLError, OSError):
            return None

    def _reason(self) -> str | None:
        """The sentence of the server's log that says why a model did not load."""
        text = self.log.read_text(errors="replace")
        found = re.findall(r"(?:UNAVAILABLE|Internal|Invalid argument): ([^|\n]+)", text) or re.findall(
            r"^E\d{4} [^\]]+\] \"?([^\n\"]+)", text, re.MULTILINE
        )
        return found[0].strip(' "') if found else None


def is_alive(pid: int) -> bool:
    """Running, and not a zombie that nobody has waited for."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
        return pid > 0 and stat.rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def port_is_free(port: int, address: str) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True
