"""BoundedHttp: uvicorn's HTTP, for clients that send too much, too slowly, or never read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from manylora.openai.api.errors import ApiError
from manylora.openai.serving.connections import Clients, error_bytes

__all__ = ["BoundedHttp"]

logger = logging.getLogger("manylora")

BODY_RATE = 1024  # bytes per second, a body's least
MAX_HEADERS = 256
MAX_TARGET = 8192  # bytes of a request's path and query
MAX_PIPELINED = 16  # requests that wait for the answer before theirs
LINGER_S = 2.0  # in which a client may still send what is not read any more, so that it sees its answer

BETWEEN, HEAD, BODY = "between requests", "in its headers", "in its body"


class BoundedHttp(HttpToolsProtocol):
    """A connection. Timers run only while it keeps the server waiting: an ordinary request starts none."""

    def __init__(self, clients: Clients, **given: Any) -> None:
        super().__init__(**given)
        self._limits, self._clients = clients.limits, clients
        self._number = -1  # its descriptor
        self._at = BETWEEN
        self._raw = 0  # bytes of this part of the request as they came
        self._head = self._body = 0  # bytes of it that mean something
        self._body_seen = 0
        self._unread = 0  # of what has just come, about: what the parser has not told of yet
        self._served: RequestResponseCycle | None = None  # uvicorn's `cycle` is the last of those that wait
        self._refusal: ApiError | None = None
        self._ended = False  # what it sends is not looked at any more
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        found = transport.get_extra_info("socket")
        self._number = -1 if found is None else found.fileno()
        self._start_timer(self._limits.header_s, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._unset_keepalive_if_required()
        if self._write_timer is not None:
            self._write_timer.cancel()
        self._disconnect()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._ended:
            return
        self._unset_keepalive_if_required()
        self._raw += len(data)
        self._unread = len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._switch()
        except httptools.HttpParserError:
            wrong = ApiError(400, "invalid_http", "This is not a valid HTTP request")
            self._refuse(self._refusal or wrong)
        else:
            self._look()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._at, self._head = HEAD, 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._unread -= len(url)
        if len(self.url) > MAX_TARGET:
            reason = f"The path and query of a request may have {MAX_TARGET} bytes"
            self._fail(ApiError(414, "uri_too_long", reason))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._at != HEAD:
            return  # behind a chunked body; what the request says must be known before it
        super().on_header(name, value)
        self._head += len(name) + len(value) + 4
        self._unread -= len(name) + len(value) + 4
        if len(self.headers) > MAX_HEADERS:
            reason = f"A request may have {MAX_HEADERS} headers"
            self._fail(ApiError(431, "headers_too_large", reason))

    def on_headers_complete(self) -> None:
        if self._head + len(self.url) > self._limits.header_bytes:
            self._fail(self._headers_too_large())
        version = self.parser.get_http_version()
        chunked = any(name == b"transfer-encoding" for name, _ in self.headers)
        if version not in ("1.0", "1.1") or (chunked and version == "1.0"):
            self._fail(ApiError(400, "invalid_http", "This server speaks HTTP/1.1"))
        if len(self.pipeline) >= MAX_PIPELINED:
            self._fail(ApiError(429, "overloaded", f"{MAX_PIPELINED} requests may wait on one connection"))
        super().on_headers_complete()
        self._at, self._raw, self._body, self._body_seen = BODY, max(0, self._unread), 0, 0
        self._stop_timer()
        self._clients.served(self._number)

    def on_body(self, body: bytes) -> None:
        self._body += len(body)
        self._unread -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._at, self._raw = BETWEEN, 0
        self._stop_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._abort_when_unread()
        elif self._at == BODY:  # answered before it was all there
            self._start_timer(self.timeout_keep_alive, self._close)
        elif self._answered:
            self._clients.waited_for(self._number)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._served = cycle
        super()._start_asgi_task(cycle, app)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._abort_when_unread()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None and not self.transport.is_closing():
            self._write_timer.cancel()
            self._write_timer = None

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def shutdown(self) -> None:
        super().shutdown()
        if self.transport.is_closing():
            self._abort_when_unread()

    def _look(self) -> None:
        """Whether what has come is within the limits, and what to wait for now."""
        if self._at == HEAD and self._raw > self._limits.header_bytes:
            self._refuse(self._headers_too_large())
        elif self._at == BODY and self._raw - self._body > self._limits.header_bytes + self._body:
            reason = "The chunks of this body are too small, or what stands between them is too large"
            self._refuse(ApiError(400, "invalid_http", reason))
        elif self._at == BODY and self._timer is None:
            self._start_timer(self._limits.body_s, self._body_is_late)
        elif self._at == HEAD and self._timer is None:
            self._start_timer(self._limits.header_s, self._head_is_late)
        elif self._at == BETWEEN and not self.transport.is_closing() and self._answered:
            if self._raw > self._limits.header_bytes:  # empty lines
                self._close()
            elif self.timeout_keep_alive_task is None:
                self._clients.waited_for(self._number)
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )

    @property
    def _answered(self) -> bool:
        """Everything that was asked."""
        return self.cycle is None or (self.cycle.response_complete and not self.pipeline)

    def _switch(self) -> None:
        """Another protocol is asked for. There is none, so the request is answered, and is the last one."""
        self._ended = True
        self.cycle.keep_alive = False
        if self.cycle.response_complete:
            self._close()

    def _headers_too_large(self) -> ApiError:
        reason = f"The request line and headers may have {self._limits.header_bytes} bytes"
        return ApiError(431, "headers_too_large", reason)

    def _fail(self, error: ApiError) -> None:
        """From within the parser, which hands on no exceptions of its callbacks."""
        self._refusal = error
        raise error

    def _head_is_late(self) -> None:
        self._timer = None
        if self.flow.read_paused:  # not the client's fault: requests before this one are under way
            self._start_timer(self._limits.header_s, self._head_is_late)
        elif self._raw == 0 and self._answered:
            self._close()  # nothing at all has come
        else:
            reason = f"The headers must come within {self._limits.header_s:g} seconds"
            self._refuse(ApiError(408, "request_timeout", reason))

    def _body_is_late(self) -> None:
        self._timer = None
        came, self._body_seen = self._body - self._body_seen, self._body
        least = int(self._limits.body_s * BODY_RATE)
        if self.flow.read_paused or came >= least:
            self._start_timer(self._limits.body_s, self._body_is_late)
        else:
            reason = f"A body must come with at least {least} bytes in {self._limits.body_s:g} seconds"
            self._refuse(ApiError(408, "request_timeout", reason))

    def _refuse(self, error: ApiError) -> None:
        """The end of this connection, with an answer where that cannot be taken for another request's."""
        logger.debug("a connection is closed %s: %s", self._at, error.message)
        self._ended = True
        self._stop_timer()
        # In a body the request has its cycle; in headers the cycle is of the request before.
        mine = self.cycle is not None and self._at == BODY and not self.pipeline
        free = self._answered or (mine and not self.cycle.response_started)
        self._disconnect()
        self.pipeline.clear()
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if free:
            self.transport.write(error_bytes(error))
        if free and self.transport.can_write_eof():
            self.transport.write_eof()
            self._start_timer(LINGER_S, self._close)
        else:
            self._close()

    def _disconnect(self) -> None:
        """Tell who works for this client that it has left."""
        if self._served is not None and not self._served.response_complete:
            self._served.disconnected = True
            self._served.waiting_for_100_continue = False
            self._served.message_event.set()

    def _close(self) -> None:
        self._timer = None
        self.transport.close()
        self._abort_when_unread()

    def _abort_when_unread(self) -> None:
        """What is still to be sent keeps a connection open, until its client reads."""
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self._limits.write_s, self.transport.abort)

    def _start_timer(self, seconds: float, then: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, then)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
