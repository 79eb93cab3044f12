"""Fingerprints of adapter files, to detect changes since they were read."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

Fingerprint = tuple[tuple[str, int, int, int, int, int], ...]
"""Per file: name, device, inode, size, and the times (ns) of the last change of its content and of its inode.
The inode's time cannot be set back.
"""
# Two writes within one tick of a file system's clock leave the same times. Times therefore identify a file's
# content only if it was last written at least this long before it was read. 2 s is the longest tick in use
# (FAT).
SETTLED_NS = 2 * 10**9
PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ESTALE, errno.ETIMEDOUT)


def is_passing(error: BaseException | None) -> bool:
    """Whether an error says nothing about the files: the machine lacks a resource, or a disk is
    unavailable.
    """
    return isinstance(error, OSError) and error.errno in PASSING


def fingerprint(path: Path) -> Fingerprint:
    """Fingerprint of a file, or of the files directly in a folder. Empty if there are none.

    Raises OSError if it cannot be determined now.
    """
    try:
        if path.is_dir():
            with os.scandir(path) as entries:
                files = [(entry.name, entry.stat()) for entry in entries if entry_is(entry.is_file)]
        else:
            files = [(path.name, path.stat())]
    except OSError as error:
        if is_passing(error):
            raise
        return ()
    return tuple(
        sorted((name, s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in files)
    )


def is_settled(found: Fingerprint, now_ns: int) -> bool:
    """Whether every file's last change is old enough for its times to identify its content."""
    return bool(found) and all(max(stamp[-2:]) + SETTLED_NS < now_ns for stamp in found)


def age_s(found: Fingerprint) -> float:
    """Seconds since the last change of any file's content. Infinite for times in the future."""
    age = time.time() - max((stamp[-2] for stamp in found), default=0) / 1e9
    return age if age >= 0 else float("inf")


def entry_is(test: Callable[[], bool]) -> bool:
    """`is_file` or `is_dir` of a directory entry. False for a link that is dangling, cyclic, or not
    accessible.
    """
    try:
        return test()
    except OSError:
        return False
