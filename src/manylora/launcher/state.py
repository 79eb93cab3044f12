"""State of a supervised service. The supervisor shares it in memory with its deputies, and other processes
read it through /proc. It needs no disk space and disappears with these processes.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

NAME = "manylora-state"
SIZE = 65536
REASON = 2000  # characters


class State:
    """Shared with all processes forked later. Only the supervisor writes."""

    def __init__(self) -> None:
        self._fd = os.memfd_create(NAME)
        self._values: dict[str, Any] = {}
        self.write(
            state="starting", reason="", server=0, processes=[], served=False, restarts=0, last_loss=""
        )

    @property
    def fd(self) -> int:
        """Of a file that only these processes have. It may be used for locks."""
        return self._fd

    def write(self, **changes: Any) -> None:
        """reason and last_loss are cut at 2,000 characters."""
        self._values |= {k: v[:REASON] if isinstance(v, str) else v for k, v in changes.items()}
        os.pwrite(self._fd, json.dumps(self._values).encode().ljust(SIZE), 0)

    def read(self) -> dict[str, Any]:
        """Includes what another process wrote."""
        self._values = _parse(os.pread(self._fd, SIZE, 0)) or self._values
        return self._values


def read_state(pid: int) -> dict[str, Any] | None:
    """State of a supervisor of the same user. None: not written yet."""
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if str(link.readlink()).startswith(f"/memfd:{NAME} "):
                    for _ in range(3):  # the supervisor may be writing
                        if found := _parse(link.read_bytes()):
                            return found
    return None


def _parse(text: bytes) -> dict[str, Any] | None:
    try:
        return json.loads(text)
    except ValueError:
        return None
