"""Fingerprints of adapter files: whether anyone has changed them since they were read."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

Fingerprint = tuple[tuple[str, int, int, int, int, int], ...]
"""Of every file its name, device, inode, size, and times (ns) of the last change of content and of inode. The
last of these cannot be set back."""
# Two writes within one tick of a filesystem's clock leave the same times: a file is known by its times only
# when it was last written this long before it was read. 2 s are the longest tick in use (FAT).
SETTLED_NS = 2 * 10**9
PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ESTALE, errno.ETIMEDOUT)


def is_passing(error: BaseException | None) -> bool:
    """Whether an error says nothing about the files: the machine is short of something, or a disk is away."""
    return isinstance(error, OSError) and error.errno in PASSING


def fingerprint(path: Path) -> Fingerprint:
    """Of a file, or of the files right in a folder. Empty: there is nothing.

    Raises OSError where that cannot be told now.
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
    """Whether every file was last changed long enough ago for its times to identify its content."""
    return bool(found) and all(max(stamp[-2:]) + SETTLED_NS < now_ns for stamp in found)


def age_s(found: Fingerprint) -> float:
    """Seconds since the last change of any file's content; infinite for times in the future."""
    age = time.time() - max((stamp[-2] for stamp in found), default=0) / 1e9
    return age if age >= 0 else float("inf")


def entry_is(test: Callable[[], bool]) -> bool:
    """`is_file` or `is_dir` of a directory entry; False for a link that leads nowhere, round in a circle or
    where nothing may be looked up."""
    try:
        return test()
    except OSError:
        return False
