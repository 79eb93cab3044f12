"""Who may be connected: HttpLimits, the sockets that clients come in by, and which of them give way."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import logging
import os
import socket
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from manylora.errors import ConfigError
from manylora.openai.api.errors import ApiError

__all__ = ["AT_ONCE", "Clients", "HttpLimits", "Listener", "error_bytes", "listen", "raise_open_files"]

logger = logging.getLogger("manylora")

OTHER_FILES = 256  # descriptors that connections leave to adapters' files, gRPC and the interpreter
SEND_BUFFER = 2**18  # bytes in the kernel for one client: by itself it takes megabytes before one must read
AT_ONCE = 64  # clients that asyncio takes before it looks at anything else
QUEUE = 2048  # clients that the kernel holds until then
NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(frozen=True)
class HttpLimits:
    """What one client may take. header_bytes: request line and headers. header_s: that they may take to come.
    body_s: in which so many seconds' BODY_RATE of a body must come. idle_s: between requests. write_s: that
    what was answered may lie unread. connections: at one time; for one address a part of them."""

    header_bytes: int = 2**16
    header_s: float = 15.0
    body_s: float = 30.0
    idle_s: float = 5.0
    write_s: float = 60.0
    connections: int = 4096
    connections_per_address: int = 2048


class Clients:
    """The open connections, of all listeners. Event loop only.

    When all places are taken, the client that the server has waited for longest gives way: one that is idle
    between requests or has not sent its headers yet. So a connection keeps nobody out until its headers are
    here, and only requests under way can fill the house.
    """

    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self._open: dict[int, tuple[socket.socket, str]] = {}  # by descriptor, with the address
        self._by_address: Counter[str] = Counter()
        self._waited_for: OrderedDict[int, None] = OrderedDict()  # the longest first

    @property
    def num_open(self) -> int:
        """Without those that have given way and are about to be closed."""
        return len(self._open)

    def admit(self, client: socket.socket, address: str) -> bool:
        """Whether there is a place; `leave` gives it back."""
        if self._by_address[address] >= self.limits.connections_per_address and not self._make_room(address):
            return False
        if self.num_open >= self.limits.connections and not self._make_room():
            return False
        number = client.fileno()
        self._open[number] = client, address
        self._by_address[address] += 1
        self._waited_for[number] = None
        return True

    def leave(self, number: int) -> None:
        """number: the descriptor."""
        if number not in self._open:  # it gave way
            return
        _, address = self._open.pop(number)
        self._waited_for.pop(number, None)
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]

    def served(self, number: int) -> None:
        """The headers of its request are here: it keeps its place."""
        self._waited_for.pop(number, None)

    def waited_for(self, number: int) -> None:
        """It has its answer."""
        if number in self._open:
            self._waited_for[number] = None

    def _make_room(self, address: str | None = None) -> bool:
        found = next((n for n in self._waited_for if address in (None, self._open[n][1])), None)
        if found is None:
            return False
        client = self._open[found][0]
        self.leave(found)
        with contextlib.suppress(OSError):  # it has just left by itself
            client.shutdown(socket.SHUT_RDWR)  # its transport sees the end, and closes it
        return True


class Listener(socket.socket):
    """Admits clients within the limits. For asyncio, which calls `accept` until BlockingIOError."""

    def __init__(self, clients: Clients, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._clients = clients
        self._spare = os.open(os.devnull, os.O_RDONLY)  # given up to turn a client away when no other is left
        self._rest = False

    def accept(self) -> tuple[socket.socket, Any]:
        if self._rest:
            self._rest = False
            raise BlockingIOError
        try:
            return self._admit(*super().accept())
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            logger.error("a client is turned away: %s", error.strerror)
            # Left alone, it would be offered again at once, for ever.
            if not self._turn_one_away():
                self._rest = True  # asyncio tries again in a second, but first as often as `backlog` says
                raise
        raise BlockingIOError

    def listen(self, backlog: int = QUEUE) -> None:
        super().listen(QUEUE)

    def close(self) -> None:
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
        super().close()

    def _admit(self, accepted: socket.socket, address: Any) -> tuple[socket.socket, Any]:
        client = _Client(accepted.family, accepted.type, accepted.proto, fileno=accepted.detach())
        who = _address(client)
        if self._clients.admit(client, who):
            number = client.fileno()
            client.closed = lambda: self._clients.leave(number)
            with contextlib.suppress(OSError):
                client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
            return client, address
        logger.warning("a client is turned away: all connections are in use")
        _refuse(client)
        raise BlockingIOError

    def _turn_one_away(self) -> bool:
        """With the spare descriptor. False: not even that could be."""
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
    closed: Callable[[], None] | None = None

    def close(self) -> None:
        told, self.closed = self.closed, None
        super().close()
        if told is not None:
            told()


def listen(host: str, port: int, clients: Clients) -> list[Listener]:
    """A socket for every address of the host; not listening yet. Raises ConfigError."""
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
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    if not sockets:
        raise ConfigError(f"cannot listen on {host}:{port}: it has no usable address")
    return sockets


def raise_open_files(wanted: int) -> int:
    """Let this process open as many files as it may. Returns how many of `wanted` connections it can hold."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    if soft == resource.RLIM_INFINITY or soft - OTHER_FILES >= wanted:
        return wanted
    possible = max(soft - OTHER_FILES, soft // 2)
    logger.warning("%d connections at most, for this process may open %d files (ulimit -n)", possible, soft)
    return possible


def error_bytes(error: ApiError) -> bytes:
    """A whole answer, for a connection that ends with it."""
    body = json.dumps(error.body(), ensure_ascii=False).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    lines = [f"{name}: {value}" for name, value in {**headers, **error.headers}.items()]
    head = "\r\n".join([f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}", *lines, "", ""])
    return head.encode() + body


def _refuse(client: socket.socket) -> None:
    """503 and the end, as far as that goes without waiting for the client."""
    full = ApiError(503, "overloaded", "Too many connections are open, try again", retry_after=1)
    with client, contextlib.suppress(OSError):
        client.setblocking(False)
        client.send(error_bytes(full))
        client.shutdown(socket.SHUT_WR)
        client.recv(2**16)  # what lies unread when a socket is closed makes the kernel take the answer back


def _address(client: socket.socket) -> str:
    """Who stands behind a connection: an address, or an IPv6 network of the size that one customer has."""
    try:
        found = ipaddress.ip_address(client.getpeername()[0].partition("%")[0])
    except (OSError, ValueError, IndexError):
        return ""
    if found.version == 4:
        return str(found)
    mapped = found.ipv4_mapped
    return str(mapped) if mapped else str(ipaddress.ip_network((found, 64), strict=False))
