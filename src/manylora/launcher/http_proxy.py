"""The HTTP door: a process in front of tritonserver's HTTP port, which hands on only what that bears.

One request can end this Triton: JSON nested a million deep, a body of a million chunks, a shape with more
elements than there is memory. So this process listens where clients come, looks at what a request says of
itself, and hands on the rest as it is; answers go back as they are. tritonserver's own port is on this
machine only and takes nothing without the secret of this start, which is added here where everybody may ask.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import re
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path

import httptools

from manylora.launcher.http_checks import MAX_BODY, MAX_JSON, RefusedError, check_json, inflate
from manylora.launcher.management_access import MANAGEMENT_HEADER
from manylora.system.allocator import give_back

__all__ = ["Answers", "Client", "Door", "main"]

logger = logging.getLogger("manylora.launcher")

MAX_HEAD = 64 * 2**10  # bytes of the request line and the headers
MAX_CONNECTIONS = 1024
MAX_HELD = 2**28  # bytes of bodies that wait for their rest, of all connections
HEAD_S, SILENCE_S, IDLE_S = 20.0, 60.0, 300.0  # to send a head; between pieces of a body; between requests
LINGER_S = 2.0  # after a refusal
SMALL = 2**18  # bytes of a body that is looked at on the spot
INNER = b"inference-header-content-length"
DROPPED = {b"connection", b"content-length", b"transfer-encoding", b"expect", b"keep-alive"}
PUBLIC = re.compile(  # whatever else there is needs the client's own secret
    rb"/v2/?|/v2/health/(?:live|ready)|/v2/models/stats"
    rb"|/v2/models/[^/]+(?:/versions/\d+)?(?:/(?:infer|generate|generate_stream|ready|config|stats))?"
)


class Client(asyncio.Protocol):
    """One connection of a client, with one of ours to tritonserver; one request at a time."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._server: Answers | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._closed = self._refused = self._full = False
        self._body = bytearray()
        self._length: int | None  # of the body, if told
        self._json: int | None  # how much of the body has to be looked at, if not all

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._door.clients.add(self)
        self._reset()
        self._wait(HEAD_S)
        if len(self._door.clients) > MAX_CONNECTIONS:
            self._refuse(RefusedError(503, f"more than {MAX_CONNECTIONS} connections are open"))

    def connection_lost(self, _: Exception | None) -> None:
        self._closed = True
        self._door.clients.discard(self)
        self._let_go()
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
                raise RefusedError(400, "send the next request when the last is answered")
            self._parser.feed_data(data)
            if self._headed:
                self._wait(SILENCE_S)
            else:
                self._count(len(data))
        except RefusedError as error:
            self._refuse(error)
        except httptools.HttpParserUpgrade:
            self._refuse(RefusedError(400, "there is nothing to upgrade to"))
        except httptools.HttpParserError as error:
            cause = error.__context__  # what one of the methods below raised
            known = isinstance(cause, RefusedError)
            self._refuse(cause if known else RefusedError(400, "this is not an HTTP request"))  # type: ignore[arg-type]

    def pause_writing(self) -> None:
        if self._server is not None:
            self._server.pause()

    def resume_writing(self) -> None:
        if self._server is not None:
            self._server.resume()

    # Of the parser.

    def on_message_begin(self) -> None:
        if self._complete:
            raise RefusedError(400, "send the next request when the last is answered")

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))
        self._count(len(name) + len(value))

    def on_headers_complete(self) -> None:
        self._headed = True
        told = dict(self._headers)
        self._length = self._number(told, b"content-length", MAX_BODY)
        if len([name for name, _ in self._headers if name in (b"content-length", INNER)]) > len(
            told.keys() & {b"content-length", INNER}
        ):
            raise RefusedError(400, "a header that gives a length comes twice")
        encoding = told.get(b"content-encoding", b"identity").strip().lower()
        if encoding not in (b"identity", b"", b"gzip", b"deflate"):
            raise RefusedError(415, "content-encoding must be gzip, deflate or identity")
        self._compressed = encoding in (b"gzip", b"deflate")
        inner = self._number(told, INNER, MAX_JSON)
        # Only then is the rest of the body tensors, which need no look.
        self._json = (
            inner if inner is not None and self._length is not None and not self._compressed else None
        )
        if told.get(b"expect", b"").lower() == b"100-continue":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        if self._sent:
            self._forward(data)
            return
        self._body += data
        self._door.held += len(data)
        if self._door.held > MAX_HELD:
            raise RefusedError(503, "too many large requests come at once: try again")
        if self._json is not None and len(self._body) >= self._json:
            self._look(whole=False)
        elif len(self._body) > MAX_JSON:
            raise RefusedError(413, f"a body, or its part that is JSON, may have at most {MAX_JSON} bytes")

    def on_message_complete(self) -> None:
        self._complete = True
        self._keeps = self._parser.should_keep_alive()
        if self._sent:
            return
        self._look(whole=True)

    def _count(self, size: int) -> None:
        self._head_size += size
        if self._head_size > MAX_HEAD:
            raise RefusedError(431, f"the headers of a request may have at most {MAX_HEAD} bytes")

    def _number(self, told: dict[bytes, bytes], name: bytes, most: int) -> int | None:
        text = told.get(name)
        if text is None:
            return None
        if not re.fullmatch(rb"\d{1,18}", text.strip()):
            raise RefusedError(400, f"header {name.decode()} must be a whole number")
        if int(text) > most:
            raise RefusedError(413, f"header {name.decode()} may be at most {most}, got {int(text)}")
        return int(text)

    def _look(self, whole: bool) -> None:
        """At what has to be seen of the body before the request goes on. whole: nothing more of it comes."""
        self._sent = True
        self._transport.pause_reading()
        body = bytes(self._body)
        self._let_go()
        self._task = asyncio.ensure_future(self._hand_on(body, whole))

    def _let_go(self) -> None:
        self._door.held -= len(self._body)
        self._body = bytearray()

    async def _hand_on(self, body: bytes, whole: bool) -> None:
        try:
            if len(body) <= SMALL and not self._compressed:
                body = self._checked(body)
            else:
                async with self._door.large:  # JSON takes much more memory when it is read
                    body = await asyncio.to_thread(self._checked, body)
                    give_back()
            if self._server is None or self._server.is_closed:
                self._server = await self._door.connect(self)
            self._server.begin(self._method == b"HEAD")
            self._server.write(self._head(len(body) if whole else self._length or 0))
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
        """The body, inflated. Raises RefusedError."""
        if self._compressed:
            body = inflate(body)
        inner = self._number(dict(self._headers), INNER, MAX_JSON)
        check_json(body if inner is None else body[:inner], self._path().endswith(b"/infer"))
        return body

    def _head(self, length: int) -> bytes:
        lines = [self._method + b" " + self._url + b" HTTP/1.1"]
        dropped = DROPPED | ({b"content-encoding"} if self._compressed else set())
        inner = MANAGEMENT_HEADER.encode()
        lines += [name + b": " + value for name, value in self._headers if name not in dropped]
        if self._door.open or PUBLIC.fullmatch(self._path()):
            lines = [line for line in lines if not line.startswith(inner + b":")]
            lines.append(inner + b": " + self._door.secret)
        lines.append(b"content-length: %d" % length)
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _path(self) -> bytes:
        return self._url.partition(b"?")[0]

    def _forward(self, data: bytes) -> None:
        if self._server is not None and data:
            self._server.write(data)

    # Of the answers.

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def answered(self) -> None:
        """The whole answer is written."""
        if not self._complete or not self._keeps:
            self._transport.close()
            return
        self._reset()
        self._wait(IDLE_S)

    def pause(self) -> None:
        """The server takes no more for now."""
        self._full = True
        if not self._closed:
            self._transport.pause_reading()

    def resume(self) -> None:
        self._full = False
        if not self._closed:
            self._transport.resume_reading()

    def server_left(self, in_between: bool) -> None:
        """Within an answer the client has to hear of it; between two, a new connection will do."""
        if not in_between and not self._refused:
            self._transport.close()

    def _reset(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._url, self._head_size = b"", 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._body = bytearray()
        self._headed = self._sent = self._complete = self._keeps = self._compressed = False
        self._length = self._json = None

    @property
    def _method(self) -> bytes:
        return self._parser.get_method()

    def _wait(self, seconds: float) -> None:
        """Close the connection if nothing comes for so long."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._silence)

    def _silence(self) -> None:
        if not self._complete:
            self._transport.close()

    def _refuse(self, error: RefusedError) -> None:
        if self._closed or self._refused:
            return
        self._refused = True
        self._let_go()
        body = json.dumps({"error": str(error)}).encode()
        head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        head += "Connection: close\r\n\r\n"
        self._transport.write(head.encode() + body)
        if self._server is not None:
            self._server.close()
        # Closed at once, with more to read, the system would take the answer back.
        asyncio.get_running_loop().call_later(LINGER_S, self._transport.close)


class Answers(asyncio.Protocol):
    """Our connection to tritonserver: what comes goes to the client as it is."""

    def __init__(self, client: Client) -> None:
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
            self._client.server_left(False)

    def on_headers_complete(self) -> None:
        if self._status_only:  # of a HEAD request
            self.on_message_complete()

    def on_message_complete(self) -> None:
        if self._open:
            self._open = False
            if not self._parser.should_keep_alive():
                self.close()
            self._client.answered()

    def connection_lost(self, _: Exception | None) -> None:
        self.is_closed = True
        self._client.server_left(not self._open)

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


class Door:
    """secret: of this start. port: tritonserver's own. is_open: management is for everybody."""

    def __init__(self, secret: bytes, port: int, is_open: bool) -> None:
        self.secret, self.open = secret, is_open
        self.clients: set[Client] = set()
        self.held = 0
        self.large = asyncio.Semaphore(1)
        self._port = port

    async def connect(self, client: Client) -> Answers:
        make: Callable[[], Answers] = lambda: Answers(client)  # noqa: E731
        _, answers = await asyncio.get_running_loop().create_connection(make, "127.0.0.1", self._port)
        return answers


async def _serve(options: argparse.Namespace) -> None:
    door = Door(options.secret_file.read_bytes().strip(), options.inner_port, options.open)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Client(door), options.address, options.port, backlog=1024)
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
