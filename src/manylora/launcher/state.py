"""What a supervisor says of its service: in memory that its deputies share and others may read, so no disk
can be too full for it, and nothing of it outlives them."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["State", "read_state"]

NAME = "manylora-state"
SIZE = 65536
REASON = 2000  # characters


class State:
    """Shared with every process forked after it was made. One writes: who supervises."""

    def __init__(self) -> None:
        self._fd = os.memfd_create(NAME)
        self._said: dict[str, Any] = {}
        self.write(
            state="starting", reason="", server=0, processes=[], served=False, restarts=0, last_loss=""
        )

    @property
    def fd(self) -> int:
        """Of a file that only these processes have: one to lock, too."""
        return self._fd

    def write(self, **changes: Any) -> None:
        """reason, last_loss: cut at 2,000 characters."""
        self._said |= {k: v[:REASON] if isinstance(v, str) else v for k, v in changes.items()}
        os.pwrite(self._fd, json.dumps(self._said).encode().ljust(SIZE), 0)

    def read(self) -> dict[str, Any]:
        """Also what another process wrote."""
        self._said = _parse(os.pread(self._fd, SIZE, 0)) or self._said
        return self._said


def read_state(pid: int) -> dict[str, Any] | None:
    """Of a supervisor of the same user; None when it has said nothing yet."""
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if str(link.readlink()).startswith(f"/memfd:{NAME} "):
                    for _ in range(3):  # it may be writing
                        if found := _parse(link.read_bytes()):
                            return found
    return None


def _parse(text: bytes) -> dict[str, Any] | None:
    try:
        return json.loads(text)
    except ValueError:
        return None
