"""One tritonserver process tree: its command, its readiness, its end."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from manylora.errors import ConfigError
from manylora.launcher.doors import management_flags
from manylora.launcher.find import Installation
from manylora.lifeline import DRAIN_FILE, PERIOD_S, REPORT, RUN_DIR, STARTING_FILE, read_reports

__all__ = ["Options", "Server", "clear_leftovers", "is_alive", "port_is_free"]

PR_SET_PDEATHSIG = 1
EXIT_TIMEOUT_S = 5
SILENCE_S = 30.0  # of the HTTP door, before the server counts as hung
PORTS_S = 10.0
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
    hang_timeout: float
    restart: bool
    verbose_log: str | None
    triton_args: tuple[str, ...]
    management_secret: str | None  # None: open


class Server:
    """Started by the constructor; `wait_ready` tells when it serves, `died` when a part of it is gone."""

    def __init__(self, installation: Installation, options: Options, run_dir: Path) -> None:
        self._options = options
        self._run_dir = run_dir
        self._stubs: set[int] = set()
        self._heard = self._moved = time.monotonic()
        self._seen = (0, 0)  # requests held and progress of the engine
        self._written: dict[str, tuple[int, float]] = {}  # report -> time of its file, when that was new
        self.log = run_dir / "server.log"
        for path in (run_dir / DRAIN_FILE, *run_dir.glob(f"{REPORT}*")):
            path.unlink(missing_ok=True)
        (run_dir / STARTING_FILE).touch()
        self._wait_for_ports()
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

    @property
    def pids(self) -> list[int]:
        """Of the server and its models' processes."""
        return [self.pid, *sorted(self._stubs)]

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
                for region in _shared_memory(self._options.http_port):
                    region.chmod(0o600)  # Triton makes them readable for everybody, whatever the umask
                (self._run_dir / STARTING_FILE).unlink(missing_ok=True)
                self._stubs = set(self._children())
                self._heard = self._moved = time.monotonic()
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

    def hung(self) -> str | None:
        """Whether the server stopped answering, a model's process stopped reporting, or the engine stopped
        stepping with requests open."""
        limit = self._options.hang_timeout
        if not limit:
            return None
        now = time.monotonic()
        if self._get("/v2/health/live", timeout=1) is not None:
            self._heard = now
        reports = read_reports(self._run_dir)
        held, progress = reports.get("tensorrt_llm", (False, 0, 0))[1:]
        if held == 0 or (held, progress) != self._seen:
            self._seen, self._moved = (held, progress), now
        if now - self._heard > min(limit, SILENCE_S):
            return f"tritonserver has not answered for {now - self._heard:.0f} s"
        for path in self._run_dir.glob(f"{REPORT}*[!~]"):
            with contextlib.suppress(OSError):
                written = path.stat().st_mtime_ns
                if self._written.get(path.name, (0, 0.0))[0] != written:
                    self._written[path.name] = (written, now)
        for name, (_, since) in self._written.items():
            if now - since > limit:
                return f"the process of model {name.removeprefix(REPORT)} is frozen for {now - since:.0f} s"
        if now - self._moved > limit:
            return f"the engine has not moved for {now - self._moved:.0f} s with {held} requests open"
        return None

    def drain(self) -> None:
        """Have new requests refused, and wait until every model's process is idle, at most the drain timeout.

        Idle for as long as two reports take: a last response may be on its way from one model to the next.
        """
        (self._run_dir / DRAIN_FILE).touch()
        now = idle_since = time.monotonic()
        deadline = now + self._options.drain_timeout
        while now < deadline and now - idle_since < 2 * PERIOD_S and not self.died():
            time.sleep(0.05)
            now = time.monotonic()
            reports = read_reports(self._run_dir).values()
            if not reports or any(held or not draining for draining, held, _ in reports):
                idle_since = now

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
        _clear_shared_memory(self._options.http_port)

    def _command(self, installation: Installation) -> list[str]:
        o = self._options
        command = [str(installation.binary), "--model-repository", str(o.model_repo), *installation.arguments]
        for kind, port in (("http", o.http_port), ("grpc", o.grpc_port), ("metrics", o.metrics_port)):
            command += [f"--{kind}-port={port}", f"--{kind}-address={o.address}"]
        command += [
            "--disable-auto-complete-config",
            f"--backend-config=python,shm-region-prefix-name={_prefix(o.http_port)}{secrets.token_hex(8)}_",
            f"--exit-timeout-secs={EXIT_TIMEOUT_S}",
        ]
        if not Path("/dev/nvidiactl").exists():
            command += ["--pinned-memory-pool-byte-size=0", "--allow-gpu-metrics=false"]
        if o.verbose_log:
            command += ["--log-verbose=3", f"--log-file={o.verbose_log}"]
        return [*command, *management_flags(o.management_secret, o.triton_args), *o.triton_args]

    def _wait_for_ports(self) -> None:
        """A server that was killed may hold its ports a moment longer."""
        o, deadline = self._options, time.monotonic() + PORTS_S
        while time.monotonic() < deadline and not all(
            port_is_free(port, o.address) for port in (o.http_port, o.grpc_port, o.metrics_port)
        ):
            time.sleep(0.1)

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

    def _get(self, path: str, body: bytes | None = None, timeout: float = 30) -> bytes | None:
        host = "127.0.0.1" if self._options.address == "0.0.0.0" else self._options.address
        url = f"http://{host}:{self._options.http_port}{path}"
        try:
            with urllib.request.urlopen(url, body, timeout) as answer:
                return answer.read()
        except (urllib.error.URLError, OSError):
            return None

    def _reason(self) -> str | None:
        """The sentence of the server's log that says why a model did not load."""
        text = self.log.read_text(errors="replace")
        found = re.findall(r"(?:UNAVAILABLE|Internal|Invalid argument): ([^|\n]+)", text) or re.findall(
            r"^E\d{4} (?!.*CudaDriverHelper)[^\]]+\] \"?([^\n\"]+)", text, re.MULTILINE
        )
        return found[0].strip(' "') if found else None


def clear_leftovers(pids: Iterable[int], http_port: int) -> None:
    """End what is left of a server whose supervisor was killed: those of `pids` that are Triton's."""
    for pid in pids:
        with contextlib.suppress(OSError):
            if b"triton" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
    _clear_shared_memory(http_port)


def _prefix(http_port: int) -> str:
    """Of the shared-memory files: one server at a time for one user and port."""
    return f"manylora_{os.getuid()}_{http_port}_"


def _shared_memory(http_port: int) -> list[Path]:
    return list(Path("/dev/shm").glob(f"{_prefix(http_port)}*"))


def _clear_shared_memory(http_port: int) -> None:
    for path in _shared_memory(http_port):
        path.unlink(missing_ok=True)


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
