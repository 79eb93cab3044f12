"""Child processes that end with their parent, and can be found again by an environment variable."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import random
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from manylora.errors import ConfigError

PR_SET_PDEATHSIG = 1
GONE_S = 5.0  # for killed processes to disappear
STOPPED_S = 5.0  # a process stopped by a signal for this long counts as hung
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")  # ephemeral ports
PORTS = range(20000, 32000)  # candidates, below the ephemeral range
MIN_FILES = 256
MAX_FILES = 2**16  # some programs close every number that a process may use, which may be 2**30
libc = ctypes.CDLL(None, use_errno=True)


def spawn(
    command: Sequence[str],
    environment: Mapping[str, str],
    output: Any = None,
    prepare: Callable[[], None] = lambda: None,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen:
    """Start a process in its own session, without terminal signals. It is killed when its parent ends.
    prepare: called in the new process before the command runs.
    """
    parent = os.getpid()

    def tie() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent was killed before the line above
            os._exit(1)
        prepare()

    return subprocess.Popen(
        command,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        preexec_fn=tie,
        pass_fds=pass_fds,
    )


def kill_child(process: subprocess.Popen | None) -> None:
    """Kill a process that this one has started, and wait for its end. None: there is none."""
    if process is not None and process.poll() is None:  # otherwise its id may belong to another process
        process.kill()
        process.wait()


def end_marked(name: str, value: str) -> None:
    """Kill every process of this user that was started with this environment variable, which neither changes
    nor is reused as process ids are. Wait until they end.
    """
    mark = f"{name}={value}".encode()
    end_all(lambda: marked(mark))


def end_all(find: Callable[[], list[int]]) -> None:
    """Kill the processes that `find` returns, until it returns none."""
    deadline = time.monotonic() + GONE_S
    while (pids := find()) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    # Orphans become children of a supervisor that is process 1 of a container: reap them.
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def marked(mark: bytes) -> list[int]:
    """Processes that were started with this NAME=VALUE in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            pid = int(path.name)
            if pid != os.getpid() and mark in (path / "environ").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def raise_open_files() -> None:
    """Open as many files as allowed, up to MAX_FILES. Raises ConfigError if they are too few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
    if wanted < MIN_FILES:
        raise ConfigError(f"a process may open only {hard} files: allow {MIN_FILES} or more (ulimit -n)")
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def exit_text(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"status {code}"


def stat_of(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the third (state) on. None if there is no such process."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return text.rsplit(")", 1)[1].split()
    return None


def free_port() -> int:
    """A free port for immediate use, outside the ephemeral range if there is one. Raises OSError."""
    try:
        first_given = int(PORT_RANGE.read_text(encoding="utf-8").split()[0])
    except (OSError, ValueError, IndexError):
        first_given = 0
    own = range(PORTS.start, min(PORTS.stop, first_given))
    draw = random.SystemRandom()  # others that use the global one may have seeded it alike
    for port in [*draw.sample(own, min(len(own), 100)), 0]:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise OSError(errno.EADDRINUSE, "no port is free")


def why_taken(port: int, address: str) -> OSError | None:
    """Why nothing can listen there. None: it can."""
    try:
        family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except OSError as error:
        return error
    return None
