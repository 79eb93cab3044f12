"""Limits on connections: listening sockets, and which connections close when too many are open."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from manylora.doors.http.api.errors import ApiError
from manylora.errors import ConfigError
from manylora.system.connections import OpenConnections, address_of, answers_at

logger = logging.getLogger("manylora")

OTHER_FILES = 256  # descriptors reserved for adapters' files, gRPC and the interpreter
SEND_BUFFER = 2**18  # bytes in the kernel for one client, which by default may grow to megabytes
AT_ONCE = 64  # connections that asyncio accepts before it handles other events
BACKLOG = 2048  # connections that wait in the kernel
ADVICE = {  # by number of an error
    errno.EADDRNOTAVAIL: "; --host is an address of this machine: 127.0.0.1 for itself, 0.0.0.0 for every "
    "interface",
    errno.EADDRINUSE: "; choose another port with --port, 0 for a free one",
    errno.EACCES: "; ports below 1024 are the system's: choose another with --port",
}
OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(frozen=True)
class HttpLimits:
    """Limits for one client; times in seconds.

    header_bytes: request line and headers. header_s: until they are complete. body_s: in which a body must
    arrive at BODY_RATE. idle_s: between requests. write_s: until a response is read. connections: open ones.
    """

    header_bytes: int = 2**16
    header_s: float = 15.0
    body_s: float = 30.0
    idle_s: float = 5.0
    write_s: float = 60.0
    connections: int = 4096
    connections_per_address: int = 2048


class Clients:
    """The open connections of all listeners. Event loop only.

    A new one over the limit closes one that is idle, so only running requests count.
    """

    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self._open: OpenConnections[int] = OpenConnections(limits.connections, limits.connections_per_address)
        self._sockets: dict[int, socket.socket] = {}  # by descriptor

    @property
    def num_open(self) -> int:
        """Excludes connections that `admit` is closing."""
        return len(self._open)

    def admit(self, client: socket.socket, address: str) -> bool:
        """Whether the connection is accepted; call `remove` when it closes."""
        number = client.fileno()
        closed = self._open.add(number, address, time.monotonic())
        if closed == number:
            return False
        self._sockets[number] = client
        if closed is not None:
            with contextlib.suppress(OSError):  # the client has just closed it
                # Its transport then sees the end of the stream and closes.
                self._sockets.pop(closed).shutdown(socket.SHUT_RDWR)
        return True

    def remove(self, number: int) -> None:
        """number: the descriptor."""
        self._open.remove(number)
        self._sockets.pop(number, None)

    def mark_busy(self, number: int) -> None:
        """The headers of its request are complete: it is not closed in favour of another."""
        self._open.mark_busy(number)

    def mark_idle(self, number: int) -> None:
        """Its response is complete."""
        self._open.mark_idle(number, time.monotonic())


class Listener(socket.socket):
    """A socket that accepts clients within the limits. asyncio calls `accept` until it would block."""

    def __init__(self, clients: Clients, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._clients = clients
        self._spare = os.open(os.devnull, os.O_RDONLY)  # closed to refuse a client when no descriptor is left
        self._paused = False

    def accept(self) -> tuple[socket.socket, Any]:
        if self._paused:
            self._paused = False
            raise BlockingIOError
        try:
            return self._admit(*super().accept())
        except OSError as error:
            if error.errno not in OUT_OF_RESOURCES:
                raise
            logger.error("a client was refused: %s", error.strerror)
            # Without accepting it, asyncio would be offered it again and again.
            if not self._refuse_one():
                self._paused = True  # asyncio retries after a second, but first calls `backlog` times
                raise
        raise BlockingIOError

    def listen(self, backlog: int = BACKLOG) -> None:
        super().listen(BACKLOG)

    def close(self) -> None:
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
            if self.family == socket.AF_UNIX and (name := self.getsockname()):
                Path(name).unlink(missing_ok=True)
        super().close()

    def _admit(self, accepted: socket.socket, address: Any) -> tuple[socket.socket, Any]:
        client = _Client(accepted.family, accepted.type, accepted.proto, fileno=accepted.detach())
        if self._clients.admit(client, address_of(address)):
            number = client.fileno()
            client.on_close = lambda: self._clients.remove(number)
            with contextlib.suppress(OSError):
                client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
            return client, address
        logger.warning("a client was refused: all connections are in use")
        _refuse(client)
        raise BlockingIOError

    def _refuse_one(self) -> bool:
        """Refuse the next client by using the spare descriptor. Returns False if that failed, too."""
        if self._spare < 0:
            return False
        os.close(self._spare)
        self._spare = -1
        try:
            _refuse(super().accept()[0])
        except OSError:
            return False
        finally:
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY)
        return True


class _Client(socket.socket):
    on_close: Callable[[], None] | None = None

    def close(self) -> None:
        on_close, self.on_close = self.on_close, None
        super().close()
        if on_close is not None:
            on_close()


def listen(host: str, port: int, clients: Clients) -> list[Listener]:
    """Bound sockets for every address of the host, not listening yet. Raises ConfigError."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"port must be 0 to 65535, got {port}")
    sockets: list[Listener] = []
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(found):
            try:
                one = Listener(clients, family, kind, protocol)
            except OSError:
                continue  # no IPv6 here
            sockets.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind(address)
    except OSError as error:
        for one in sockets:
            one.close()
        advice = ADVICE.get(
            errno.EADDRNOTAVAIL if isinstance(error, socket.gaierror) else error.errno or 0, ""
        )
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}{advice}") from error
    if not sockets:
        raise ConfigError(f"cannot listen on {host}:{port}: it has no usable address")
    return sockets


def listen_uds(path: Path, clients: Clients) -> Listener:
    """A socket bound to a path, in place of one on which nobody listens. Raises ConfigError."""
    one = Listener(clients, socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket() and not answers_at(path):
            path.unlink()
        one.bind(str(path))  # who may connect is decided by the umask
    except OSError as error:
        one.close()
        is_used = error.errno == errno.EADDRINUSE
        advice = "; another server listens there, or it is another file: give another path" if is_used else ""
        raise ConfigError(f"cannot listen on --uds {path}: {error.strerror or error}{advice}") from error
    return one


def check_certificate(certificate: Path | None, key: Path | None) -> None:
    """Raises ConfigError for files that cannot serve HTTPS. key: None if it is in the certificate's file."""
    for name, path in (("ssl_certfile", certificate), ("ssl_keyfile", key)):
        if path is not None and not path.is_file():
            raise ConfigError(f"{name} {path} is not a file: give a PEM file")
    if certificate is None:
        return
    try:
        # The empty password prevents a prompt on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except OSError as error:
        reason = error.strerror
        if isinstance(error, ssl.SSLError):
            mismatch = error.reason == "KEY_VALUES_MISMATCH"
            reason = "the key does not match" if mismatch else "there is no certificate with its key"
        given = f"ssl_certfile {certificate}" + ("" if key is None else f" and ssl_keyfile {key}")
        needed = "both must be PEM files, the key without a password"
        raise ConfigError(f"HTTPS cannot be served with {given}: {reason}; {needed}") from error


def raise_open_files(wanted: int) -> int:
    """Raise this process's limit of open files. Returns how many of the `wanted` connections it allows."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    if soft == resource.RLIM_INFINITY or soft - OTHER_FILES >= wanted:
        return wanted
    possible = max(soft - OTHER_FILES, soft // 2)
    logger.warning("at most %d connections: this process may open only %d files (ulimit -n)", possible, soft)
    return possible


def error_bytes(error: ApiError) -> bytes:
    """A complete HTTP response, after which the connection closes."""
    body = json.dumps(error.body(), ensure_ascii=False).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    lines = [f"{name}: {value}" for name, value in {**headers, **error.headers}.items()]
    head = "\r\n".join([f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}", *lines, "", ""])
    return head.encode() + body


def _refuse(client: socket.socket) -> None:
    """Send 503 and close without waiting for the client."""
    full = ApiError(503, "overloaded", "Too many connections are open, try again", retry_after=1)
    with client, contextlib.suppress(OSError):
        client.setblocking(False)
        client.send(error_bytes(full))
        client.shutdown(socket.SHUT_WR)
        client.recv(2**16)  # closing with unread data would discard the response
