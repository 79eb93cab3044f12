"""Folders that a process holds while it lives, temporary ones that are removed with it, and CopyFolder.

A lock on a folder shows that a process uses it. The kernel releases the lock however its process ends. Unlike
a process id, it also works across containers that share a disk. Folders of killed processes are removed when
the same user's next process creates a temporary folder.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

logger = logging.getLogger("manylora")

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


RETRY_S = 30.0  # before writing again to a disk that failed
SCAN_S = 10.0  # after which files of other processes are looked for
MANY = 128  # files that are looked for each time; with more, an eighth of max_bytes is freed at once
PART = r"(\.part-\d+-\d+)?"  # after the name of a file that is not complete


class CopyFolder:
    """Files by name. Beyond max_bytes the least recently used is deleted.

    folder: None creates a temporary one, which `close` removes. ours: matches the names of files that may be
    deleted in it. what: named in the log. Thread-safe, and several processes may share a folder: a file
    appears only when complete. A full or broken disk only loses copies: no method raises an error because of
    it.
    """

    def __init__(self, max_bytes: int, folder: Path | None, ours: str, what: str) -> None:
        self._max_bytes, self._folder, self._what = max_bytes, folder, what
        self._temporary, self._ours = folder is None, re.compile(ours + PART)
        self._lock = threading.Lock()  # held while files are looked for or deleted
        self._sizes: dict[str, int] = {}  # of the files, the least recently used first, as of the last scan,
        self._scanned_at = -SCAN_S
        self.num_bytes = self.num_evicted = 0  # and since then
        self._failing = False
        self._retry_at = 0.0  # after a failure

    @property
    def is_writable(self) -> bool:
        """Whether files are kept at all, and the disk has not failed a moment ago."""
        return bool(self._max_bytes) and time.monotonic() >= self._retry_at

    def path(self, name: str) -> Path | None:
        """None if nothing was ever written."""
        return None if self._folder is None else self._folder / name

    def knows(self, name: str) -> bool:
        """Whether there probably is such a file. The disk is not asked."""
        return name in self._sizes

    @property
    def is_outdated(self) -> bool:
        return time.monotonic() - self._scanned_at > SCAN_S

    def scan(self) -> None:
        """Look for files, also those of other processes."""
        with self._lock, suppress(OSError):
            self._scan()

    def has(self, name: str) -> bool:
        """Whether there is such a file. It then counts as just used."""
        path = self.path(name)
        if path is None:
            return False
        try:
            os.utime(path)
        except OSError:
            return False
        return True

    def put(self, name: str, num_bytes: int, write: Callable[[Path], None]) -> None:
        """Let `write` write a file of about num_bytes, unless it exists."""
        if num_bytes > self._max_bytes or self.has(name) or not self.is_writable:
            return
        try:
            path = self._make_space(num_bytes) / name
            part = path.with_name(f"{name}.part-{os.getpid()}-{threading.get_ident()}")
            try:
                write(part)
                size = part.stat().st_size
                part.replace(path)
            except BaseException:
                with suppress(OSError):
                    part.unlink()
                raise
        except OSError as error:
            self.fail(error.strerror)
        else:
            if self._failing:
                logger.warning("%s: copies can be written again", self._what)
            self._failing, self._retry_at = False, 0.0
            with self._lock:
                self.num_bytes += size - self._sizes.get(name, 0)
                self._sizes[name] = size

    def remove(self, name: str) -> None:
        path = self.path(name)
        with suppress(OSError):
            if path is not None:
                path.unlink()
        with self._lock:
            self.num_bytes -= self._sizes.pop(name, 0)

    def fail(self, reason: str | None) -> None:
        """Log the failure once, until writing works again, and pause: partial copies fill a disk, too."""
        self._retry_at = time.monotonic() + RETRY_S
        if not self._failing:
            logger.warning("%s: copies cannot be written, serving goes on without: %s", self._what, reason)
        self._failing = True

    def close(self) -> None:
        """Idempotent."""
        if self._temporary and self._folder is not None:
            remove_temporary(self._folder)

    def _make_space(self, num_bytes: int) -> Path:
        """Delete files of ours, including unfinished ones, the least recently used first. Raises OSError."""
        with self._lock:
            if self._folder is None:
                self._folder = make_temporary("adapters")
            self._folder.mkdir(parents=True, exist_ok=True)
            few = len(self._sizes) < MANY
            if few or self.is_outdated or self.num_bytes + num_bytes > self._max_bytes:
                self._scan()
            if self.num_bytes + num_bytes > self._max_bytes:
                slack = 0 if few else self._max_bytes // 8
                for name in list(self._sizes):
                    if self.num_bytes + num_bytes + slack <= self._max_bytes:
                        break
                    (self._folder / name).unlink(missing_ok=True)
                    self.num_bytes -= self._sizes.pop(name)
                    self.num_evicted += 1
            return self._folder

    def _scan(self) -> None:
        assert self._folder is not None
        files = []
        for entry in os.scandir(self._folder):
            with suppress(FileNotFoundError):  # another process deleted it first
                if self._ours.fullmatch(entry.name):
                    files.append((entry.stat().st_mtime_ns, entry.name, entry.stat().st_size))
        self._sizes = {name: size for _, name, size in sorted(files)}
        self.num_bytes, self._scanned_at = sum(self._sizes.values()), time.monotonic()
