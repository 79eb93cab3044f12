"""Folders that a process holds while it lives, and temporary ones that are removed with it.

A lock on a folder shows that a process uses it. The kernel releases the lock however its process ends. Unlike
a process id, it also works across containers that share a disk. Folders of killed processes are removed when
the same user's next process creates a temporary folder.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW  # other users may write links to /tmp

_temporary: dict[Path, tuple[int, int]] = {}
"""Folder -> the descriptor that holds it, and the process that created it, because a fork copies this
table.
"""


def hold(folder: Path, lock: int = fcntl.LOCK_SH) -> int:
    """Returns a descriptor. While it is open, here or in a fork, nobody removes the folder. lock: as for
    `flock`. Raises FileNotFoundError if it is gone, BlockingIOError if it is locked, OSError if its disk has
    no locks.
    """
    descriptor = os.open(folder, FLAGS)
    try:
        fcntl.flock(descriptor, lock)
        if not os.path.samestat(os.fstat(descriptor), folder.lstat()):
            raise FileNotFoundError(folder)  # removed before it was locked, and created again
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def remove_unless_held(folder: Path) -> bool:
    """Returns whether it was removed."""
    try:
        descriptor = hold(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    shutil.rmtree(folder, ignore_errors=True)
    os.close(descriptor)
    return True


def make_temporary(kind: str) -> Path:
    """A new folder of this process, `manylora-USER-KIND-…` in the folder of `tempfile`.

    It is removed by `remove_temporary`, when the interpreter exits, or after the process has ended. kind:
    lower-case letters. Raises OSError.
    """
    # Remove folders that killed processes of this user left behind.
    ours = re.compile(rf"manylora-{os.getuid()}-[a-z]+-[a-z0-9_]{{8}}")
    with suppress(OSError):
        for left in Path(tempfile.gettempdir()).iterdir():
            with suppress(OSError):
                if ours.fullmatch(left.name) and left.lstat().st_uid == os.getuid():
                    remove_unless_held(left)
    if not _temporary:
        atexit.unregister(_remove_all)
        atexit.register(_remove_all)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"manylora-{os.getuid()}-{kind}-"))
        try:
            descriptor = hold(folder)
        except FileNotFoundError:  # between these two lines it looked abandoned
            continue
        except OSError:  # no locks: then no other process removes it either
            descriptor = -1
        _temporary[folder] = descriptor, os.getpid()
        return folder


def remove_temporary(folder: Path) -> None:
    """Remove a folder of `make_temporary`. What cannot be removed stays. Idempotent."""
    descriptor, _ = _temporary.pop(folder, (-1, 0))
    shutil.rmtree(folder, ignore_errors=True)
    if descriptor >= 0:
        os.close(descriptor)


@contextmanager
def temporary_folder(kind: str) -> Iterator[Path]:
    """`make_temporary` for the duration of the block."""
    folder = make_temporary(kind)
    try:
        yield folder
    finally:
        remove_temporary(folder)


def _remove_all() -> None:
    for folder, (_, maker) in list(_temporary.items()):
        if maker == os.getpid():
            remove_temporary(folder)
