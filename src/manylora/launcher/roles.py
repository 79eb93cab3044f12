"""Which process supervises a service and which ones stand by. Each role is a lock on one byte of a file.

The kernel releases a lock when its process ends, and tells which process holds it. A process id written to a
file could belong to another process by now.
"""

from __future__ import annotations

import fcntl
import os
import struct
from contextlib import suppress
from pathlib import Path

SUPERVISOR = 0
DEPUTIES = (1, 2)  # two, so that one survives if the supervisor and the other are killed together
LAUNCH = 3  # held by the command that starts a service until that has started
FLOCK = "@hhqqi"  # struct flock: type, whence, start, length, pid


class Roles:
    """fd: of the file, open for writing. A forked child shares the file but holds no role.

    Nothing else in this process may open the file, because closing it would release the locks.
    """

    def __init__(self, fd: int, folder: int | None = None) -> None:
        self._fd = fd
        self.files = [fd] if folder is None else [fd, folder]

    @classmethod
    def of(cls, path: Path, create: bool = False) -> Roles:
        """Raises OSError."""
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
        fd = os.open(path, flags, 0o600)
        folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
        # systemd-tmpfiles removes old files of /tmp, but skips locked folders.
        fcntl.flock(folder, fcntl.LOCK_SH)
        return cls(fd, folder)

    def is_at(self, path: Path) -> bool:
        """Whether the file still has this name. Another process may have removed it when it ended."""
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._fd), path.lstat())
        return False

    def take(self, role: int) -> bool:
        """Return False if another process has it."""
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, role)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def wait(self, role: int) -> None:
        """Block until the holder ends, then take the role."""
        fcntl.lockf(self._fd, fcntl.LOCK_EX, 1, role)

    def leave(self, role: int) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, role)

    def holder(self, role: int) -> int:
        """Process id of the other process that has it. 0: none; -1: a process outside this container."""
        asked = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, role, 1, 0).ljust(64, b"\0")
        kind, *_, pid = struct.unpack_from(FLOCK, fcntl.fcntl(self._fd, fcntl.F_GETLK, asked))
        return 0 if kind == fcntl.F_UNLCK else pid or -1

    def holders(self) -> list[int]:
        """Holders of the supervisor's and the deputies' roles."""
        return [pid for role in (SUPERVISOR, *DEPUTIES) if (pid := self.holder(role))]

    def close(self) -> None:
        for fd in self.files:
            os.close(fd)
