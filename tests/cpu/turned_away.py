"""What a server does without descriptors, in a process of its own: another thread of the tests' process may
close one in between."""

from __future__ import annotations

import contextlib
import resource
import socket
from collections.abc import Sequence

from manylora.doors.http.serving.connections import Clients, HttpLimits, listen


def main(arguments: Sequence[str]) -> None:
    clients = Clients(HttpLimits())
    [listener] = listen("127.0.0.1", 0, clients)
    with listener, contextlib.ExitStack() as stack:
        listener.listen()
        listener.setblocking(False)
        waiting = [stack.enter_context(socket.create_connection(listener.getsockname())) for _ in range(3)]
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free(), hard))
        try:
            for _ in range(2):
                with contextlib.suppress(BlockingIOError):
                    listener.accept()
                    raise AssertionError("there was a descriptor")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert [all_of(one)[:12] for one in waiting[:2]] == [b"HTTP/1.1 503"] * 2
        accepted, _ = listener.accept()
        assert clients.num_open == 1
        accepted.close()
        assert clients.num_open == 0


def lowest_free() -> int:
    with socket.socket() as one:
        return one.fileno()


def all_of(client: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := client.recv(65536):
            found += piece
    return found
