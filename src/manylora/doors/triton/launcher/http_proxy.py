"""The HTTP proxy: a process in front of tritonserver's port that forwards only what the server can handle.

A single request can crash this version of Triton: JSON nested a million deep, a body of a million chunks, or
a shape with more elements than fit in memory. Responses pass through unchanged. tritonserver's own port is
bound to this machine and requires a secret, which the proxy adds to requests that any client may send.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import resource
import socket
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path

import httptools

from manylora.doors.triton.launcher.http_checks import (
    ChunkedBody,
    Head,
    RefusedError,
    check_json,
    forwarded_head,
    inflate,
    read_head,
)
from manylora.system.connections import OpenConnections, address_of
from manylora.system.resources import release_free_memory

try:
    from uvloop import run
except ImportError:
    from asyncio import run  # type: ignore[assignment]

logger = logging.getLogger("manylora.launcher")

MAX_HEAD = 2**16  # bytes of request line and headers
MAX_CONNECTIONS = 4096
MAX_REFUSED = 256  # further connections, which are being refused or closed
OTHER_FILES = 24  # descriptors that are no connections
MAX_WAITING = 2**28  # bytes of incomplete requests, over all connections
HEAD_S, IDLE_S = 20.0, 300.0  # for a head; between requests
SILENCE_S, STEP = 60.0, 2**14  # for each 16 KiB of a body, or for the client to read what was sent
LINGER_S = 2.0  # to read on after a refusal
SWEEP_S = 1.0  # between two looks for clients that are too slow
SMALL = 2**18  # bodies up to this many bytes are checked at once
NEVER = float("inf")


class Connection(asyncio.Protocol):
    is_closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    def write(self, data: bytes) -> None:
        if not self.is_closed:
            self._transport.write(data)

    def pause(self) -> None:
        if not self.is_closed:
            self._transport.pause_reading()

    def resume(self) -> None:
        if not self.is_closed:
            self._transport.resume_reading()


class ClientConnection(Connection):
    """A client's connection. One request at a time: what follows it waits until it is answered."""

    def __init__(self, proxy: HttpProxy) -> None:
        self._proxy = proxy
        self._server: ServerConnection | None = None
        self._task: asyncio.Task[None] | None = None
        self._refused = self._server_full = self._slow_reader = False
        self._received = bytearray()  # not forwarded yet
        self._checked = 0  # bytes that are being checked
        self._counted = 0  # bytes of both in the proxy's sum
        self.deadline = NEVER  # the client must have gone on before, in seconds of the loop
        self._begin()

    def _begin(self) -> None:
        self._head: Head | None = None
        self._chunks: ChunkedBody | None = None
        self._rest = 0  # bytes of the body that go on to the server unseen
        self._sent = False
        self._step = 0

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        proxy, now = self._proxy, self._proxy.time()
        proxy.clients.add(self)
        self.deadline = now + HEAD_S
        evicted = proxy.connections.add(self, address_of(transport.get_extra_info("peername")), now)
        if evicted is self:
            self._refuse(RefusedError(503, "too many connections are open: try again"))
        elif evicted is not None:
            evicted.close()
        if len(proxy.clients) > proxy.most:
            self._transport.abort()

    def connection_lost(self, _: Exception | None) -> None:
        self.is_closed = True
        self._proxy.clients.discard(self)
        self._proxy.connections.remove(self)
        self._received.clear()
        self._count()
        if self._task is not None:
            self._task.cancel()
        self._release()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._rest and self._server is not None:
            part, data = data[: self._rest], data[self._rest :]
            self._rest -= len(part)
            self._server.write(part)
            self._went_on(len(part))
        if data:
            self._received += data
            self._advance(len(data))

    def pause_writing(self) -> None:
        self._slow_reader = True
        self._wait()
        if self._server is not None:
            self._server.pause()

    def resume_writing(self) -> None:
        self._slow_reader = False
        self._wait()
        if self._server is not None:
            self._server.resume()

    def on_silence(self) -> None:
        if self._transport.is_closing():  # the client does not read what is left
            self._transport.abort()
        else:
            self.close()

    def _wait(self) -> None:
        if self.is_closed or self._refused or self._transport.is_closing():
            return
        seconds = IDLE_S
        if self._slow_reader or self._rest or (self._head is not None and not self._sent):
            seconds = SILENCE_S
        elif self._sent:
            seconds = NEVER
        elif self._received:
            seconds = HEAD_S
        self.deadline = self._proxy.time() + seconds

    # The request.

    def _advance(self, size: int) -> None:
        try:
            if self._sent:  # it is the next request's
                self._transport.pause_reading()
                return
            if self._head is None and not self._read_head(size):
                return
            self._read_body(size)
        except RefusedError as error:
            self._refuse(error)
        finally:
            self._count()

    def _read_head(self, size: int) -> bool:
        if size == len(self._received):
            self._wait()
        end = self._received.find(b"\r\n\r\n", max(0, len(self._received) - size - 3))
        if end > MAX_HEAD or (end < 0 and len(self._received) > MAX_HEAD):
            raise RefusedError(431, f"the headers of a request may have at most {MAX_HEAD} bytes")
        if end < 0:
            return False
        # An empty line may come before (RFC 9112, 2.2): some clients end a body with one.
        self._head = head = read_head(bytes(self._received[:end]).removeprefix(b"\r\n"))
        del self._received[: end + 4]
        if head.length is None:
            self._chunks = ChunkedBody()
        if head.expects and not self._received:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return True

    def _read_body(self, size: int) -> None:
        """Start the request when as much of the body is here as must be seen."""
        head, chunks = self._head, self._chunks
        assert head is not None
        self._went_on(size)
        if chunks is None:
            needed, length = head.checked_length or 0, head.length or 0
            if len(self._received) < needed:
                return
            # What is here of the tensors goes with it.
            body = bytes(self._received[:length])
            del self._received[:length]
            self._rest = length - len(body)
        else:
            chunks.feed(bytes(self._received))
            self._received.clear()
            if not chunks.ended:
                return
            body = bytes(chunks.body)
            chunks.body.clear()
        self._sent = True
        self._wait()
        self._proxy.connections.mark_busy(self)
        server = None
        if len(body) <= SMALL and not head.compressed:
            _checked_body(head, body)
            server = self._proxy.idle_server()
        if server is None:
            self._transport.pause_reading()
            self._checked = len(body)
            self._task = asyncio.ensure_future(self._start(head, body))
        else:
            self._forward(head, body, server)

    def _went_on(self, size: int) -> None:
        self._step += size
        if self._step >= STEP or (self._sent and not self._rest):
            self._step = 0
            self._wait()

    def _count(self) -> None:
        held = len(self._received) + self._checked + (len(self._chunks.body) if self._chunks else 0)
        self._proxy.waiting_bytes += held - self._counted
        self._counted = held
        if held and self._proxy.waiting_bytes > MAX_WAITING:
            self._refuse(RefusedError(503, "too many large requests come at once: try again"))

    async def _start(self, head: Head, body: bytes) -> None:
        try:
            if len(body) > SMALL or head.compressed:
                async with self._proxy.large:  # parsed JSON takes much more memory
                    body = await asyncio.to_thread(_checked_body, head, body)
                    release_free_memory()
            self._forward(head, body, self._proxy.idle_server() or await self._proxy.connect())
        except RefusedError as error:
            self._refuse(error)
        except OSError:
            self._refuse(RefusedError(503, "the server is not there: it is starting or restarting"))
        except Exception:
            logger.exception("a request could not be looked at")
            self._refuse(RefusedError(400, "the request could not be read"))
        finally:
            self._checked = 0
            self._count()
            if not self._server_full:
                self.resume()

    def _forward(self, head: Head, body: bytes, server: ServerConnection) -> None:
        self._server, server.client = server, self
        proxy = self._proxy
        server.write(forwarded_head(head, len(body) + self._rest, proxy.secret, proxy.open) + body)

    # The response.

    def on_answered(self) -> None:
        assert self._head is not None
        if self._rest:
            self._linger()
            return
        if not self._head.keeps or (self._chunks and self._chunks.exceeded):
            self.close()
            return
        self._server = None
        self._begin()
        self._wait()
        self._proxy.connections.mark_idle(self, self._proxy.time())
        self.resume()
        if self._received:
            self._advance(len(self._received))

    def pause(self) -> None:
        self._server_full = True
        super().pause()

    def resume(self) -> None:
        self._server_full = False
        super().resume()

    def close(self) -> None:
        """The client may still read what was sent."""
        self._release()
        self._transport.close()
        self.deadline = self._proxy.time() + SILENCE_S

    def _release(self) -> None:
        if self._server is not None:
            self._server.client = None
            self._server.close()
            self._server = None

    def _refuse(self, error: RefusedError) -> None:
        if self.is_closed or self._refused or self._transport.is_closing():
            return
        body = json.dumps({"error": str(error)}).encode()
        head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        head += "Connection: close\r\n\r\n"
        self._transport.write(head.encode() + body)
        self._linger()

    def _linger(self) -> None:
        """Read on for a moment, then close: unread data would make the system discard the response."""
        self._refused = True
        self._received.clear()
        self._chunks = None
        self._count()
        self._transport.write_eof()
        self._release()
        self.deadline = self._proxy.time() + LINGER_S
        self._proxy.connections.mark_idle(self, self.deadline)


def _checked_body(head: Head, body: bytes) -> bytes:
    """Decompressed. Raises RefusedError."""
    body = inflate(body) if head.compressed else body
    check_json(body[: head.json_length], head.endpoint == b"infer")
    return body


class ServerConnection(Connection):
    """A connection to tritonserver. client: whose request it has; None: it waits for the next."""

    def __init__(self, proxy: HttpProxy) -> None:
        self._proxy = proxy
        self.client: ClientConnection | None = None
        self._parser = httptools.HttpResponseParser(self)  # only finds the end of a response

    def data_received(self, data: bytes) -> None:
        if self.client is None:
            self.close()
            return
        self.client.write(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._lose_client()
            self.close()

    def on_message_complete(self) -> None:
        client, self.client = self.client, None
        if self._parser.should_keep_alive():
            self._proxy.keep(self)
        else:
            self.close()
        if client is not None:
            client.on_answered()

    def connection_lost(self, _: Exception | None) -> None:
        self.is_closed = True
        self._lose_client()

    def pause_writing(self) -> None:
        if self.client is not None:
            self.client.pause()

    def resume_writing(self) -> None:
        if self.client is not None:
            self.client.resume()

    def close(self) -> None:
        self.is_closed = True
        self._transport.close()

    def _lose_client(self) -> None:
        """Within a response the client must be told."""
        client, self.client = self.client, None
        if client is not None:
            client.close()


class HttpProxy:
    """secret: of this start. port: tritonserver's own. is_open: whether all clients may use management."""

    def __init__(self, secret: bytes, port: int, is_open: bool) -> None:
        self.secret, self.open = secret, is_open
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        refused = min(MAX_REFUSED, files // 8)
        possible = max(1, (files - OTHER_FILES - refused) // 2)  # one for the client, one for the server
        self.connections: OpenConnections[ClientConnection] = OpenConnections(min(MAX_CONNECTIONS, possible))
        self.most = self.connections.most + refused
        self.clients: set[ClientConnection] = set()  # also those that are being refused or closed
        self.waiting_bytes = 0
        self.large = asyncio.Semaphore(1)
        self.time = asyncio.get_running_loop().time
        self._port = port
        self._idle: list[ServerConnection] = []

    async def connect(self) -> ServerConnection:
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(lambda: ServerConnection(self), "127.0.0.1", self._port)
        return made

    def keep(self, server: ServerConnection) -> None:
        server.resume()
        self._idle.append(server)

    def idle_server(self) -> ServerConnection | None:
        while self._idle:
            server = self._idle.pop()
            if not server.is_closed:
                return server
        return None

    async def close_silent(self) -> None:
        """Close the connections of clients that do not go on. Does not return."""
        while True:
            await asyncio.sleep(SWEEP_S)
            now = self.time()
            for client in [one for one in self.clients if one.deadline < now]:
                client.on_silence()


class Probe(Connection):
    """The launcher's connection: what it sends comes back while this process serves."""

    def data_received(self, data: bytes) -> None:
        self.write(data)


async def _serve(options: argparse.Namespace) -> None:
    proxy = HttpProxy(options.secret_file.read_bytes().strip(), options.inner_port, options.open)
    loop = asyncio.get_running_loop()
    await loop.create_server(lambda: ClientConnection(proxy), options.address, options.port, backlog=1024)
    await loop.create_unix_connection(Probe, sock=socket.socket(fileno=options.probe))
    await proxy.close_silent()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--address")
    parser.add_argument("--port", type=int)
    parser.add_argument("--inner-port", type=int)
    parser.add_argument("--secret-file", type=Path)
    parser.add_argument("--open", action="store_true")
    parser.add_argument("--probe", type=int, help="descriptor of a connected socket")
    options = parser.parse_args()
    with suppress(KeyboardInterrupt):
        run(_serve(options))


if __name__ == "__main__":
    main()
