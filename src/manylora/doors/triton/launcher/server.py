"""The service that the launcher supervises: tritonserver, its HTTP proxy and its models' processes. When it
hangs, and when it has too much memory.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import math
import os
import re
import select
import socket
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

from manylora.doors.triton.launcher import processes, server_command
from manylora.doors.triton.launcher.run_directory import ServerLog, open_log
from manylora.doors.triton.launcher.supervisor import StoppedError, wait_for_ports
from manylora.errors import ConfigError
from manylora.system.lifeline import (
    DRAIN_FILE,
    PERIOD_S,
    RUN_DIR,
    STARTING_FILE,
    WORLD_SIZE,
    OwnClock,
    read_reports,
)

logger = logging.getLogger("manylora.launcher")

PROXY = "manylora.doors.triton.launcher.http_proxy"
UNCLAIMED_S = 1.0  # a dead model process the server ignores for this long was not noticed by it
PROBE_S = 0.5
LOOK_S = 2.0  # of `OwnClock`: the most that one check, which may wait for HTTP, can add
SILENCE_S = 30.0  # a process without an answer for this long counts as hung, unless it computes
BUSY = 1 / 30  # processor time per second from which a process computes; an idle tritonserver takes 1/500
PATIENCE = 10  # a process that computes may be silent for this many times as long
QUIET_S = 2.0  # idle time before a server that has grown is restarted
USER, SYSTEM, RESIDENT = 11, 12, 21  # indices of processor time and resident pages in `stat_of`
PAGE, TICK = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")


class Silence:
    """Decides when a process that does not answer hangs. One that uses the processor may be busy with large
    requests, and ending it would end the requests of others.
    """

    def __init__(self, now: float) -> None:
        self._answered = self._moved = now
        self._used = 0.0

    def of(self, answered: bool, used: float, now: float, limit: float) -> float | None:
        """For how many seconds it has not answered, if it hangs; otherwise None.

        answered: since the last call. used: seconds of processor time. limit: seconds. now: of any clock.
        """
        limit = min(limit, SILENCE_S)
        if answered:
            self._answered = now
        if answered or used - self._used >= BUSY * limit:
            self._moved, self._used = now, used
        silent = now - self._answered
        return silent if now - self._moved > limit or silent > PATIENCE * limit else None


class MemoryLimit:
    """Decides when tritonserver, which never frees the memory of large tensors and refused gRPC requests, is
    restarted because of its memory. limit: bytes, 0 for none.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._quiet_since: float | None = None

    def exceeded(self, resident: int, held: int, now: float) -> str | None:
        """The reason to restart now: over the limit and idle for a moment, or over twice the limit.

        resident: bytes of the server. held: open requests. now: seconds of a monotonic clock.
        """
        if held or not self._limit or resident <= self._limit:
            self._quiet_since = None
        elif self._quiet_since is None:
            self._quiet_since = now
        is_quiet = self._quiet_since is not None and now - self._quiet_since > QUIET_S
        if is_quiet or 0 < 2 * self._limit < resident:
            return f"tritonserver holds {resident >> 20} MiB, of at most {self._limit >> 20}"
        return None


class ProxyProbe:
    """Sockets: the HTTP proxy sends back what it gets. other: its end; close it once the proxy has it."""

    def __init__(self) -> None:
        self._own, self.other = socket.socketpair()
        self._own.setblocking(False)

    def answered(self) -> bool:
        """Whether it has answered since the last call. Asks again."""
        answered = False
        with contextlib.suppress(OSError):  # nothing is there
            answered = bool(self._own.recv(2**10))
        with contextlib.suppress(OSError):  # it does not read
            self._own.send(b"?")
        return answered

    def close(self) -> None:
        self._own.close()


class TritonServer:
    """A service of the supervisor, started any number of times on the same ports. options: the launcher's,
    with server_memory in bytes, management_secret, and verbose_log: the file of a verbose log, or None.
    """

    def __init__(self, installation: server_command.Installation, options: Namespace, run_dir: Path) -> None:
        self._installation, self._options, self._run_dir = installation, options, run_dir
        self._log = ServerLog(run_dir / "server.log")
        self._started: list[subprocess.Popen] = []
        # Whether models can be loaded at run time: `--triton-arg=--model-control-mode=explicit`.
        self._loads_models = any("model-control-mode" in one for one in options.triton_arg)

    def start(self, stopping: Callable[[], bool]) -> None:
        """Return when every model answers.

        Raises ConfigError if the server refuses, RuntimeError if it or a model's process crashed or hangs,
        TimeoutError after the start timeout, StoppedError if `stopping` returned True.
        """
        o = self._options
        wait_for_ports(o.address, (o.http_port, o.grpc_port, o.metrics_port), stopping)
        self._models: dict[int, str] = {}  # process -> model, loading or loaded
        self._since: dict[tuple[str, int], float] = {}  # (problem, process) -> since when
        self._clock = OwnClock(LOOK_S)  # measures how long a problem lasts; read at every check
        self._last_probe = time.monotonic()
        self._seen = (0, 0)  # open requests and progress of the engine
        self._memory = MemoryLimit(o.server_memory)
        self._written: dict[int, tuple[int, float]] = {}  # process -> time of its report, first seen at
        with contextlib.suppress(OSError):  # on a full disk an earlier server's marks may remain
            (self._run_dir / DRAIN_FILE).unlink(missing_ok=True)
            (self._run_dir / STARTING_FILE).touch()
        self._log.skip()
        self._spawn()
        self._wait_ready(stopping)
        self._last_progress = now = self._clock.read()
        self._silence, self._proxy_silence = Silence(now), Silence(now)

    def _spawn(self) -> None:
        o = self._options
        self._inner_port = processes.free_port()
        mark = {RUN_DIR: str(self._run_dir)} | {
            name: str(n) for name, n in server_command.ALLOCATOR.items() if name not in os.environ
        }
        environment = self._installation.environment | mark
        if o.world_size is not None:
            environment |= {WORLD_SIZE: str(o.world_size)}
        processes.raise_open_files()
        log = open_log(self._log.path)
        try:
            self._proxy_probe = ProxyProbe()
            command = server_command.server_command(self._installation, o, self._inner_port)
            self._process = processes.spawn(command, environment, log, server_command.widen_stacks)
            self._started.append(self._process)
            with self._proxy_probe.other as probe:
                command = [sys.executable, "-m", PROXY, f"--address={o.address}", f"--port={o.http_port}"]
                command += [f"--inner-port={self._inner_port}", f"--probe={probe.fileno()}"]
                command += [f"--secret-file={self._run_dir / server_command.SECRET_FILE}"]
                command += ["--open"] if o.open_management else []
                self._proxy = processes.spawn(command, os.environ | mark, log, pass_fds=[probe.fileno()])
            self._started.append(self._proxy)
        finally:
            os.close(log)

    def processes(self) -> list[int]:
        return [self._process.pid, self._proxy.pid, *sorted(self._models)]

    def _wait_ready(self, stopping: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self._options.start_timeout

        def going() -> bool:
            return not stopping() and self._broken() is None and time.monotonic() < deadline

        probes: list[tuple[str, str | None]] = [("/v2/health/ready", None)]
        if (self._options.model_repo / "ensemble").is_dir():
            canary = json.dumps({"text_input": "a", "max_tokens": 1})
            probes.append(("/v2/models/ensemble/generate", canary))
        proxy_answered = False
        while going():
            # Polled within the loop, because a server whose models died may never respond.
            proxy_answered = proxy_answered or self._proxy_probe.answered()
            if proxy_answered and all(self._answers(path, going, body) for path, body in probes):
                with contextlib.suppress(OSError):
                    for region in server_command.shared_memory(self._options.http_port):
                        region.chmod(0o600)  # Triton makes them world-readable, whatever the umask
                    (self._run_dir / STARTING_FILE).unlink(missing_ok=True)
                self._find_models()
                return
            time.sleep(0.1)
        if stopping():
            raise StoppedError
        if (error := self._broken()) is not None:
            raise error
        reason = self._log.refusal()
        raise TimeoutError(
            f"tritonserver was not ready after {self._options.start_timeout:.0f} s"
            + (f": {reason}" if reason else "")
        )

    def _broken(self) -> Exception | None:
        """Why the start can no longer succeed. None: it still can."""
        code = self._process.poll()
        if code is not None:
            if code < 0:
                why = self._log.last_words()
                return RuntimeError(f"tritonserver ended with signal {-code} while starting{why}")
            reason = self._log.refusal() or self._log.complaint()
            if reason is None or "is not healthy" in reason:  # a model's process died
                return RuntimeError(reason or f"tritonserver ended with status {code} while starting")
            return ConfigError(reason)
        if (code := self._proxy.poll()) is not None:
            return RuntimeError(f"the HTTP proxy ended with status {code} while starting")
        self._find_models()
        for pid in self._children():
            model, fields = self._models.get(pid, "a model"), processes.stat_of(pid)
            ended = fields is not None and fields[0] == "Z"
            if self._lasts("ended", pid, ended) > UNCLAIMED_S and not self._log.refusal():
                return RuntimeError(f"{model}'s process ended{_how(fields)} while loading")
            if self._stopped(pid, fields):
                return RuntimeError(f"{model}'s process was stopped by a signal while loading")
        return None

    def _lasts(self, what: str, pid: int, now: bool) -> float:
        if not now:
            self._since.pop((what, pid), None)
            return 0.0
        at = self._clock.read()
        return at - self._since.setdefault((what, pid), at)

    def _stopped(self, pid: int, fields: list[str] | None) -> bool:
        """Whether a process has been stopped by a signal for too long. fields: from `stat_of`."""
        lasts = self._lasts("stopped", pid, fields is not None and fields[0] == "T")
        return lasts > min(self._options.hang_timeout or math.inf, processes.STOPPED_S)

    def loss(self) -> str | None:
        self._clock.read()
        if (loss := self._died()) is not None:
            return loss
        if time.monotonic() - self._last_probe < PROBE_S:
            return None
        self._last_probe = time.monotonic()
        if self._loads_models:
            self._find_models()
        if (loss := self._hangs()) is not None or (fields := processes.stat_of(self._process.pid)) is None:
            return loss
        held = sum(report.held for report in read_reports(self._run_dir, self._models).values())
        return self._memory.exceeded(int(fields[RESIDENT]) * PAGE, held, time.monotonic())

    def _died(self) -> str | None:
        for name, process in (("tritonserver", self._process), ("the HTTP proxy", self._proxy)):
            if (code := process.poll()) is not None:
                return f"{name} ended with {processes.exit_text(code)}"
        for pid, model in list(self._models.items()):
            fields = processes.stat_of(pid)
            if fields is None or fields[0] == "Z":  # the server reaps only processes that it ended itself
                if self._loads_models and not _how(fields):
                    logger.info("%s was unloaded, or could not be loaded", model)
                    del self._models[pid]
                    self._written.pop(pid, None)
                    continue
                return f"{model}'s process ended{_how(fields)}"
        return None

    def _hangs(self) -> str | None:
        limit = self._options.hang_timeout
        if not limit:
            return None
        names = {self._process.pid: "tritonserver", self._proxy.pid: "the HTTP proxy"}
        names |= {pid: f"{m}'s process" for pid, m in self._models.items()}
        for pid, name in names.items():
            if self._stopped(pid, processes.stat_of(pid)):
                return f"{name} was stopped by a signal"
        now, until = self._clock.read(), time.monotonic() + 1
        answered = self._answers("/v2/health/live", lambda: time.monotonic() < until)
        silence = self._silence.of(answered, _processor_time(self._process.pid), now, limit)
        if silence is not None:
            return f"tritonserver has not answered for {silence:.0f} s"
        used = _processor_time(self._proxy.pid)
        if (silence := self._proxy_silence.of(self._proxy_probe.answered(), used, now, limit)) is not None:
            return f"the HTTP proxy has not answered for {silence:.0f} s"
        reports = read_reports(self._run_dir, self._models)
        engines = [report for pid, report in reports.items() if self._models[pid] == "tensorrt_llm"]
        held, progress = sum(one.held for one in engines), sum(one.progress for one in engines)
        if held == 0 or (held, progress) != self._seen:
            self._seen, self._last_progress = (held, progress), now
        for pid, report in reports.items():
            if self._written.get(pid, (0, 0.0))[0] != report.written_ns:
                self._written[pid] = (report.written_ns, now)
            if now - self._written[pid][1] > limit:
                return f"{self._models[pid]}'s process is frozen for {now - self._written[pid][1]:.0f} s"
        if now - self._last_progress > limit:
            return f"the engine has not moved for {now - self._last_progress:.0f} s with {held} requests open"
        return None

    def stop(self, hurry: Callable[[], bool]) -> None:
        """Drain it, at most for the drain timeout; shut it down in order, then by force.

        Idle must last for two reports: a last response may be on its way from one model to the next.
        """
        try:
            (self._run_dir / DRAIN_FILE).touch()
        except OSError as error:
            logger.warning("new requests are not refused while the server stops: %s", error)
        now = idle_since = time.monotonic()
        deadline = now + self._options.drain_timeout
        while now < deadline and now - idle_since < 2 * PERIOD_S and not self._died() and not hurry():
            time.sleep(0.05)
            now = time.monotonic()
            reports = read_reports(self._run_dir, self._models).values()
            if not reports or any(report.held or not report.draining for report in reports):
                idle_since = now
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(self._options.exit_timeout + 3)
        self.kill()

    def kill(self) -> None:
        for process in self._started:
            processes.kill_child(process)
        if self._started:
            self._proxy_probe.close()
        self._started.clear()
        server_command.remove_leftovers(self._run_dir, self._options.http_port)

    def _children(self) -> Iterator[int]:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{self._process.pid}/task").iterdir():
                with contextlib.suppress(OSError):
                    yield from map(int, (task / "children").read_text(encoding="utf-8").split())

    def _find_models(self) -> None:
        for pid in self._children():
            if pid not in self._models:
                with contextlib.suppress(OSError):
                    found = re.search(
                        rb"/([^/\0]+)/[0-9]+/model\.py\0", Path(f"/proc/{pid}/cmdline").read_bytes()
                    )
                    if found:  # otherwise it is not yet the model's process
                        self._models[pid] = found[1].decode(errors="replace")

    def _answers(self, path: str, going: Callable[[], bool], body: str | None = None) -> bool:
        """Whether tritonserver itself answers: the public port may be full. going: False: give up."""
        connection = http.client.HTTPConnection("127.0.0.1", self._inner_port, timeout=1)
        headers = {server_command.MANAGEMENT_HEADER: self._options.management_secret}
        try:
            connection.request("POST" if body else "GET", path, body, headers)
            while not select.select([connection.sock], [], [], 0.1)[0]:
                if not going():
                    return False
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def _processor_time(pid: int) -> float:
    fields = processes.stat_of(pid)
    return (int(fields[USER]) + int(fields[SYSTEM])) / TICK if fields else 0.0


def _how(fields: list[str] | None) -> str:
    """How a process that nobody has reaped has ended."""
    code = os.waitstatus_to_exitcode(int(fields[-1])) if fields else 0
    return f" with {processes.exit_text(code)}" if code else ""
