"""The HTTP proxy: a process in front of tritonserver's HTTP port that forwards only what the server can
handle.

A single request can crash this version of Triton: JSON nested a million deep, a body of a million chunks, or
a shape with more elements than fit in memory. This process therefore listens on the public port, checks
requests, and forwards them unchanged; responses pass through unchanged. tritonserver's own port is bound to
this machine and requires a secret that is new at each start. The proxy adds it to requests that any client
may send.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path

import httptools

from manylora.launcher.http_checks import (
    MAX_JSON,
    BodyInfo,
    RefusedError,
    body_info,
    check_json,
    forwarded_head,
    inflate,
    path_of,
)
from manylora.system.allocator import release_free_memory

logger = logging.getLogger("manylora.launcher")

MAX_HEAD = 64 * 2**10  # bytes of request line and headers
MAX_CONNECTIONS = 1024
MAX_WAITING = 2**28  # bytes of incomplete bodies, over all connections
HEAD_S, SILENCE_S, IDLE_S = 20.0, 60.0, 300.0  # for a head; between parts of a body; between requests
LINGER_S = 2.0  # to read on after a refusal
SMALL = 2**18  # bodies up to this many bytes are checked at once


class ClientConnection(asyncio.Protocol):
    """A client's connection, and the matching connection to tritonserver. One request at a time."""

    def __init__(self, proxy: HttpProxy) -> None:
        self._proxy = proxy
        self._server: ServerConnection | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._closed = self._refused = self._full = False
        self._body = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._proxy.clients.add(self)
        self._reset()
        self._close_after(HEAD_S)
        if len(self._proxy.clients) > MAX_CONNECTIONS:
            self._refuse(RefusedError(503, f"more than {MAX_CONNECTIONS} connections are open"))

    def connection_lost(self, _: Exception | None) -> None:
        self._closed = True
        self._proxy.clients.discard(self)
        self._drop_body()
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
        if self._server is not None:
            self._server.close()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        try:
            if self._sent and self._complete:
                raise RefusedError(400, "send the next request when the last is on_answered")
            self._parser.feed_data(data)
            if self._head_read:
                self._close_after(SILENCE_S)
            else:
                self._count(len(data))
        except RefusedError as error:
            self._refuse(error)
        except httptools.HttpParserUpgrade:
            self._refuse(RefusedError(400, "there is nothing to upgrade to"))
        except httptools.HttpParserError as error:
            cause = error.__context__  # raised by one of the methods below
            known = isinstance(cause, RefusedError)
            self._refuse(cause if known else RefusedError(400, "this is not an HTTP request"))  # type: ignore[arg-type]

    def pause_writing(self) -> None:
        if self._server is not None:
            self._server.pause()

    def resume_writing(self) -> None:
        if self._server is not None:
            self._server.resume()

    # Called by the parser.

    def on_message_begin(self) -> None:
        if self._complete:
            raise RefusedError(400, "send the next request when the last is on_answered")

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))
        self._count(len(name) + len(value))

    def on_headers_complete(self) -> None:
        self._head_read = True
        self._info = body_info(self._headers)
        if dict(self._headers).get(b"expect", b"").lower() == b"100-continue":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        if self._sent:
            self._forward(data)
            return
        self._body += data
        self._proxy.waiting_bytes += len(data)
        if self._proxy.waiting_bytes > MAX_WAITING:
            raise RefusedError(503, "too many large requests come at once: try again")
        checked_length = self._info.checked_length
        if checked_length is not None and len(self._body) >= checked_length:
            self._check(whole=False)
        elif len(self._body) > MAX_JSON:
            raise RefusedError(413, f"a body, or its part that is JSON, may have at most {MAX_JSON} bytes")

    def on_message_complete(self) -> None:
        self._complete = True
        self._keeps = self._parser.should_keep_alive()
        if self._sent:
            return
        self._check(whole=True)

    def _count(self, size: int) -> None:
        self._head_size += size
        if self._head_size > MAX_HEAD:
            raise RefusedError(431, f"the headers of a request may have at most {MAX_HEAD} bytes")

    def _check(self, whole: bool) -> None:
        """Check the part of the body that has to be seen before the request is forwarded. whole: it is
        complete.
        """
        self._sent = True
        self._transport.pause_reading()
        body = bytes(self._body)
        self._drop_body()
        self._task = asyncio.ensure_future(self._pass_on(body, whole))

    def _drop_body(self) -> None:
        self._proxy.waiting_bytes -= len(self._body)
        self._body = bytearray()

    async def _pass_on(self, body: bytes, whole: bool) -> None:
        try:
            if len(body) <= SMALL and not self._info.compressed:
                body = self._checked(body)
            else:
                async with self._proxy.large:  # parsed JSON takes much more memory
                    body = await asyncio.to_thread(self._checked, body)
                    release_free_memory()
            if self._server is None or self._server.is_closed:
                self._server = await self._proxy.connect(self)
            self._server.begin(self._method == b"HEAD")
            length = len(body) if whole else self._info.length or 0
            proxy, headers = self._proxy, self._headers
            self._server.write(
                forwarded_head(self._method, self._url, headers, self._info, length, proxy.secret, proxy.open)
            )
            self._forward(body)
        except RefusedError as error:
            self._refuse(error)
        except OSError:
            self._refuse(RefusedError(503, "the server is not there: it is starting or restarting"))
        except Exception:
            logger.exception("a request could not be looked at")
            self._refuse(RefusedError(400, "the request could not be read"))
        finally:
            if not self._full:
                self.resume()

    def _checked(self, body: bytes) -> bytes:
        """The decompressed body. Raises RefusedError."""
        if self._info.compressed:
            body = inflate(body)
        check_json(body[: self._info.json_length], path_of(self._url).endswith(b"/infer"))
        return body

    def _forward(self, data: bytes) -> None:
        if self._server is not None and data:
            self._server.write(data)

    # Called for the response.

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def on_answered(self) -> None:
        """The whole response has been written."""
        if not self._complete or not self._keeps:
            self._transport.close()
            return
        self._reset()
        self._close_after(IDLE_S)

    def pause(self) -> None:
        """The server cannot take more for now."""
        self._full = True
        if not self._closed:
            self._transport.pause_reading()

    def resume(self) -> None:
        self._full = False
        if not self._closed:
            self._transport.resume_reading()

    def server_closed(self, in_between: bool) -> None:
        """Within a response the client must be told. Between two, a new connection will do."""
        if not in_between and not self._refused:
            self._transport.close()

    def _reset(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._url, self._head_size = b"", 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._body = bytearray()
        self._head_read = self._sent = self._complete = self._keeps = False
        self._info = BodyInfo()

    @property
    def _method(self) -> bytes:
        return self._parser.get_method()

    def _close_after(self, seconds: float) -> None:
        """Close the connection if nothing arrives for this long."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._on_silence)

    def _on_silence(self) -> None:
        if not self._complete:
            self._transport.close()

    def _refuse(self, error: RefusedError) -> None:
        if self._closed or self._refused:
            return
        self._refused = True
        self._drop_body()
        body = json.dumps({"error": str(error)}).encode()
        head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        head += "Connection: close\r\n\r\n"
        self._transport.write(head.encode() + body)
        if self._server is not None:
            self._server.close()
        # Closing now, with unread data, would make the system discard the response (TCP reset).
        asyncio.get_running_loop().call_later(LINGER_S, self._transport.close)


class ServerConnection(asyncio.Protocol):
    """The connection to tritonserver. Its data is forwarded to the client unchanged."""

    def __init__(self, client: ClientConnection) -> None:
        self._client = client
        self.is_closed = False
        self._open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    def begin(self, headless: bool) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._open, self._status_only = True, headless

    def write(self, data: bytes) -> None:
        if not self.is_closed:
            self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        self._client.write(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()
            self._client.server_closed(False)

    def on_headers_complete(self) -> None:
        if self._status_only:  # the response to a HEAD request has no body
            self.on_message_complete()

    def on_message_complete(self) -> None:
        if self._open:
            self._open = False
            if not self._parser.should_keep_alive():
                self.close()
            self._client.on_answered()

    def connection_lost(self, _: Exception | None) -> None:
        self.is_closed = True
        self._client.server_closed(not self._open)

    def pause_writing(self) -> None:
        self._client.pause()

    def resume_writing(self) -> None:
        self._client.resume()

    def pause(self) -> None:
        if not self.is_closed:
            self._transport.pause_reading()

    def resume(self) -> None:
        if not self.is_closed:
            self._transport.resume_reading()

    def close(self) -> None:
        self.is_closed = True
        self._transport.close()


class HttpProxy:
    """secret: of this start. port: tritonserver's own. is_open: whether all clients may use management."""

    def __init__(self, secret: bytes, port: int, is_open: bool) -> None:
        self.secret, self.open = secret, is_open
        self.clients: set[ClientConnection] = set()
        self.waiting_bytes = 0
        self.large = asyncio.Semaphore(1)
        self._port = port

    async def connect(self, client: ClientConnection) -> ServerConnection:
        make: Callable[[], ServerConnection] = lambda: ServerConnection(client)  # noqa: E731
        _, answers = await asyncio.get_running_loop().create_connection(make, "127.0.0.1", self._port)
        return answers


async def _serve(options: argparse.Namespace) -> None:
    proxy = HttpProxy(options.secret_file.read_bytes().strip(), options.inner_port, options.open)
    place = options.address, options.port
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: ClientConnection(proxy), *place, backlog=1024)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--address")
    parser.add_argument("--port", type=int)
    parser.add_argument("--inner-port", type=int)
    parser.add_argument("--secret-file", type=Path)
    parser.add_argument("--open", action="store_true")
    options = parser.parse_args()
    with suppress(KeyboardInterrupt):
        asyncio.run(_serve(options))


if __name__ == "__main__":
    main()
