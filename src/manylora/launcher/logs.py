"""Log files of limited size: a service that runs for years must not fill the disk."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

LOG_BYTES = 2**24  # of one file; as much again is kept of what came before


def open_log(path: Path) -> int:
    """Open for appending, for this user alone; if that fails, as on a full disk, output is discarded."""
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


def limit_size(path: Path, limit: int = LOG_BYTES) -> None:
    """Empty a file that has grown beyond `limit` bytes; the last `limit` of them are copied to NAME.1.

    It is not renamed, because processes have it open and go on writing to it.
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
