"""The run directory of a launcher, one per user and HTTP port: logs of limited size, reports, state.

Two locks show who uses it: the launcher that starts a service locks the directory, and a supervisor that it
forks keeps the lock; the supervisor locks the file with the state. The kernel releases them however their
process ends, and names the holder; a process id in a file could belong to another process by now.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import resource
import shutil
import stat
import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from manylora.errors import ConfigError
from manylora.system.folders import hold

STATE = "state.json"
STATE_BYTES = 65536
RANK = "-rank"  # suffix of the run directory of a rank without a server
FLOCK = "@hhqqi"  # struct flock: type, whence, start, length, pid
LOGS = ("server.log", "supervisor.log")
LOG_BYTES = 2**24  # per log; the same amount of older output is kept


class RunDirectory:
    """http_port: of the service. rank: of a launcher that runs a rank without a server; 0: it has one."""

    def __init__(self, http_port: int, rank: int = 0) -> None:
        name = f"manylora-{os.getuid()}-{http_port}"
        self.path = temporary_folder() / (f"{name}{RANK}{rank}" if rank else name)
        self.log = self.path / "server.log"
        self.http_port, self.rank = http_port, rank
        self._lock = self._state = -1

    def claim(self) -> None:
        """Create and lock it, or take a killed launcher's. Raises ConfigError if another has it."""
        while True:
            try:
                self.path.mkdir(mode=0o700, exist_ok=True)
                self.check_owner()
                self._lock = hold(self.path, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except FileNotFoundError:  # removed by a launcher that was exiting
                continue
            except BlockingIOError as error:
                by = f" (process {pid})" if (pid := self.supervisor()) else ""
                raise ConfigError(
                    f"a launcher runs already for this port{by}: end it with --stop "
                    f"--http_port={self.http_port}, or choose other ports "
                    "(--http_port, --grpc_port, --metrics_port)"
                ) from error
            except OSError as error:
                text = f"the run directory {self.path} cannot be made: {error.strerror}"
                raise ConfigError(text) from error

    def check_owner(self) -> None:
        """Raises ConfigError if another user could have created something in place of our directory."""
        with suppress(FileNotFoundError):
            found = self.path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
                raise ConfigError(f"{self.path} is not a directory that only this user can use: remove it")

    def supervise(self) -> None:
        """Mark this process as the supervisor. From here on, closing the state releases the lock."""
        self._state = os.open(self.path / STATE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        fcntl.lockf(self._state, fcntl.LOCK_EX)

    def supervisor(self) -> int:
        """The supervisor's process id, if it is another process. 0: none; -1: outside this container."""
        try:
            descriptor = os.open(self.path / STATE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return 0
        try:
            asked = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0).ljust(64, b"\0")
            kind, *_, pid = struct.unpack_from(FLOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
        finally:
            os.close(descriptor)
        return 0 if kind == fcntl.F_UNLCK else pid or -1

    def write_state(self, values: Mapping[str, Any]) -> None:
        """Only the supervisor does. The file is overwritten in place, because this works on a full disk."""
        with suppress(OSError):
            os.pwrite(self._state, json.dumps(values).encode().ljust(STATE_BYTES), 0)

    def read_state(self) -> dict[str, Any]:
        """What a supervisor wrote last. Empty if there is nothing yet."""
        with suppress(OSError):
            for _ in range(3):  # the supervisor may be writing
                with suppress(ValueError):
                    return dict(json.loads((self.path / STATE).read_bytes()))
        return {}

    def status(self) -> dict[str, Any]:
        """What `--status` shows. Empty if nothing was launched here, or it was stopped."""
        supervisor, state = self.supervisor(), self.read_state()
        if supervisor:
            state = state or {"state": "starting", "reason": ""}
            return state | {"supervisor": supervisor, "log": str(self.log)}
        if not state:
            return {}
        reason = state["reason"] if state.get("state") == "failed" else "the supervisor was killed"
        return {"state": "failed", "reason": reason, "log": str(self.log)}

    def prepare(self) -> None:
        """Remove what a killed launcher left behind, and take the room of the state. Raises OSError."""
        for path in self.path.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        (self.path / STATE).write_bytes(b" " * STATE_BYTES)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def temporary_folder() -> Path:
    """The folder of `tempfile`, also when it is full: with any other, --stop would not find the server."""
    given = (os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP"))
    return next((Path(path) for path in given if path and Path(path).is_dir()), Path("/tmp")).absolute()


def rank_directories(http_port: int) -> list[RunDirectory]:
    server, found = RunDirectory(http_port).path, []
    for path in server.parent.glob(f"{server.name}{RANK}*"):
        rank = path.name.rpartition(RANK)[2]
        with suppress(FileNotFoundError):  # it is being removed
            if rank.isdecimal() and path.lstat().st_uid == os.getuid():
                found.append(RunDirectory(http_port, int(rank)))
    return sorted(found, key=lambda directory: directory.rank)


def open_log(path: Path) -> int:
    """Open for appending, for this user only. If that fails (a full disk), output is discarded."""
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


def limit_size(path: Path, limit: int = LOG_BYTES) -> None:
    """Truncate a file beyond `limit` bytes, after copying its last `limit` bytes to NAME.1. It is not
    renamed, because other processes have it open.
    """
    with suppress(OSError):
        if path.stat().st_size <= limit:
            return
        with path.open("r+b") as log:
            log.seek(-limit, os.SEEK_END)
            with suppress(OSError), open(open_log(path.with_name(f"{path.name}.1")), "wb") as kept:
                kept.truncate(0)
                shutil.copyfileobj(log, kept)
            log.truncate(0)


class ServerLog:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._start = 0

    def skip(self) -> None:
        """Ignore what is there: it is of an earlier server."""
        self._start = self.path.stat().st_size if self.path.exists() else 0

    def refusal(self) -> str | None:
        found = re.findall(r"(?:UNAVAILABLE|Internal|Invalid argument): ([^|\n]+)", self._read())
        return found[0].split("\\n")[0].strip(' "') if found else None  # without Python's traceback

    def complaint(self) -> str | None:
        """The first error of any kind, but for two that every server without a GPU logs."""
        errors = r"^E\d{4} (?!.*(?:CudaDriverHelper|unable to create stream))[^\]]+\] \"?([^\n\"]+)"
        found = re.findall(errors, self._read(), re.MULTILINE)
        return found[0].strip(' "') if found else None

    def last_words(self) -> str:
        """The error that ended the server, as C++ writes it, and a limit that may be why; or nothing."""
        found = re.findall(r"^ +what\(\): +(.+)", self._read(), re.MULTILINE)
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            found += [f"a process may have only {limit >> 20} MiB of addresses (ulimit -v)"]
        return "".join(f": {text}" for text in found[-2:])

    def _read(self) -> str:
        try:
            with self.path.open("rb") as log:
                size = os.fstat(log.fileno()).st_size
                log.seek(self._start if self._start <= size else 0)
                return log.read(LOG_BYTES).decode(errors="replace")
        except OSError:
            return ""
