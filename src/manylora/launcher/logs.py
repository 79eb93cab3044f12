"""Log files of limited size. A service that runs for years must not fill the disk."""

from __future__ import annotations

import os
import re
import resource
import shutil
from contextlib import suppress
from pathlib import Path

LOG_BYTES = 2**24  # per file; the same amount of older output is kept


def open_log(path: Path) -> int:
    """Open for appending, readable by this user only. If that fails, as on a full disk, output is
    discarded.
    """
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


def limit_size(path: Path, limit: int = LOG_BYTES) -> None:
    """Truncate a file that has grown beyond `limit` bytes, after copying its last `limit` bytes to NAME.1.

    It is not renamed, because other processes have it open and keep writing to it.
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
    """Finds out why tritonserver did not start."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._start = 0

    def skip(self) -> None:
        """Ignore what is there: it is of an earlier server."""
        self._start = self.path.stat().st_size if self.path.exists() else 0

    def refusal(self) -> str | None:
        """The message that says why a model did not load."""
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
