"""How the engine's model learns that a client of the ensemble has disconnected.

Triton does not tell it: only steps that start afterwards are marked as cancelled, and in a stream these are
postprocessing's. Therefore postprocessing checks some of its requests, and sends the engine's model the
request number from the response that it processes, as a datagram through the launcher's run directory. A lost
datagram is sent again with the stream's next tokens.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from manylora.system.lifeline import RUN_DIR
from manylora.wire.server_types import ServerRequest

NUMBER = "REQUEST_NUMBER"  # input of postprocessing
SOCKET = "disconnects"
PERIOD_S = 0.005  # a check is a round trip to the server


class DisconnectReporter:
    """For postprocessing. Without a launcher it does nothing, because nobody listens."""

    def __init__(self) -> None:
        self._path = _path()
        self._asked = 0.0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    def check_one(self, requests: Sequence[ServerRequest[Any]]) -> None:
        """Check whether one of these requests was cancelled, unless another check was made a moment ago."""
        now = time.monotonic()
        if self._path is None or now - self._asked < PERIOD_S:
            return
        self._asked = now
        request = requests[int(now * 1e6) % len(requests)]
        for tensor in request.inputs():
            if tensor.name() == NUMBER and request.is_cancelled():
                with contextlib.suppress(OSError):
                    self._socket.sendto(b"%d" % tensor.as_numpy().reshape(-1)[0], str(self._path))


def listen(disconnected: Callable[[int], None]) -> None:
    """disconnected: called on a thread with the number of a request whose client has disconnected, possibly
    repeatedly.
    """
    path = _path()
    if path is None:
        return
    path.unlink(missing_ok=True)
    receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    receiver.bind(str(path))

    def receive() -> None:
        while True:
            disconnected(int(receiver.recv(32)))

    threading.Thread(target=receive, name="manylora-disconnects", daemon=True).start()


def _path() -> Path | None:
    folder = os.environ.get(RUN_DIR)
    return Path(folder) / SOCKET if folder else None
