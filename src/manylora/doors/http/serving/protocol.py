"""BoundedHttp: uvicorn's HTTP protocol, with limits on the size and speed of clients' data."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from manylora.doors.http.api.errors import ApiError
from manylora.doors.http.serving.connections import Clients, error_bytes

logger = logging.getLogger("manylora")

BODY_RATE = 1024  # minimum bytes per second of a body
MAX_HEADERS = 256
MAX_TARGET = 8192  # bytes of path and query
MAX_PIPELINED = 16  # pipelined requests that may wait on one connection
LINGER_S = 2.0  # before closing after a refusal: closing earlier would discard the response

BETWEEN, HEAD, BODY = "between requests", "in its headers", "in its body"


class BoundedHttp(HttpToolsProtocol):
    """One connection. A timer runs only while the server waits for the client. Most requests need none."""

    def __init__(self, clients: Clients, **given: Any) -> None:
        super().__init__(**given)
        self._limits, self._clients = clients.limits, clients
        self._too_large = f"The request line and headers may have {clients.limits.header_bytes} bytes"
        self._number = -1  # the descriptor
        self._state = BETWEEN
        self._raw = 0  # bytes received for the current part of the request
        self._head = self._body = 0  # bytes of headers and of the body, without framing
        self._body_seen = 0  # self._body when the timer last fired
        self._unparsed = 0  # approximate bytes of the last data that the parser has not reported
        self._running: RequestResponseCycle | None = None  # uvicorn's `cycle` is the last one in the pipeline
        self._error: ApiError | None = None  # raised in a callback of the parser
        self._ended = False  # further data is ignored
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
        self._unparsed = len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError:
            wrong = ApiError(400, "invalid_http", "This is not a valid HTTP request")
            self._refuse(self._error or wrong)
        else:
            self._check_limits()

    def _parse(self, data: bytes) -> None:
        """Raises HttpParserError."""
        while True:
            try:
                return self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as asked:
                # The parser takes what follows for another protocol. None is spoken here, so the client gets
                # an answer in HTTP/1.1, also to its body: parse the same head without its wish.
                method, version = self.parser.get_method(), self.parser.get_http_version().encode()
                lines = [b"%s %s HTTP/%s" % (method, self.url, version)]
                lines += [b"%s: %s" % (name, value) for name, value in self.headers if name != b"upgrade"]
                data = b"\r\n".join([*lines, b"", b""]) + data[asked.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._state, self._head = HEAD, 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._unparsed -= len(url)
        if len(self.url) > MAX_TARGET:
            self._fail(414, "uri_too_long", f"The path and query of a request may have {MAX_TARGET} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._state != HEAD:
            return  # trailers of a chunked body
        super().on_header(name, value)
        self._head += len(name) + len(value) + 4
        self._unparsed -= len(name) + len(value) + 4
        if len(self.headers) > MAX_HEADERS:
            self._fail(431, "headers_too_large", f"A request may have {MAX_HEADERS} headers")

    def on_headers_complete(self) -> None:
        if self._head + len(self.url) > self._limits.header_bytes:
            self._fail(431, "headers_too_large", self._too_large)
        if self.parser.get_method() == b"CONNECT":
            self._fail(405, "method_not_allowed", "CONNECT is for proxies, which this is not")
        if self.parser.should_upgrade():
            return  # `_parse` comes again
        version = self.parser.get_http_version()
        chunked = any(name == b"transfer-encoding" for name, _ in self.headers)
        if version not in ("1.0", "1.1") or (chunked and version == "1.0"):
            self._fail(400, "invalid_http", "This server speaks HTTP/1.1")
        if len(self.pipeline) >= MAX_PIPELINED:
            self._fail(429, "overloaded", f"{MAX_PIPELINED} requests may wait on one connection")
        super().on_headers_complete()
        self._state, self._raw, self._body, self._body_seen = BODY, max(0, self._unparsed), 0, 0
        self._stop_timer()
        self._clients.mark_busy(self._number)

    def on_body(self, body: bytes) -> None:
        self._body += len(body)
        self._unparsed -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._state, self._raw = BETWEEN, 0
        self._stop_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._abort_when_unread()
        elif self._state == BODY:  # responded before the body was complete
            self._start_timer(self.timeout_keep_alive, self._close)
        elif self._all_answered:
            self._clients.mark_idle(self._number)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
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

    def _check_limits(self) -> None:
        """After each piece of data: check its size, and start the timer for what comes next."""
        if self._state == HEAD and self._raw > self._limits.header_bytes:
            self._refuse(ApiError(431, "headers_too_large", self._too_large))
        elif self._state == BODY and self._raw - self._body > self._limits.header_bytes + self._body:
            reason = "The chunks of this body are too small, or their extensions are too large"
            self._refuse(ApiError(400, "invalid_http", reason))
        elif self._state == BODY and self._timer is None:
            self._start_timer(self._limits.body_s, self._body_is_late)
        elif self._state == HEAD and self._timer is None:
            self._start_timer(self._limits.header_s, self._head_is_late)
        elif self._state == BETWEEN and not self.transport.is_closing() and self._all_answered:
            if self._raw > self._limits.header_bytes:  # only empty lines
                self._close()
            elif self.timeout_keep_alive_task is None:
                self._clients.mark_idle(self._number)
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )

    @property
    def _all_answered(self) -> bool:
        """Whether every request has its complete response."""
        return self.cycle is None or (self.cycle.response_complete and not self.pipeline)

    def _fail(self, status: int, code: str, reason: str) -> None:
        """Stop the parser from within a callback. The parser swallows the exception, so store it."""
        self._error = ApiError(status, code, reason)
        raise self._error

    def _head_is_late(self) -> None:
        self._timer = None
        if self.flow.read_paused:  # not the client's fault: earlier requests are running
            self._start_timer(self._limits.header_s, self._head_is_late)
        elif self._raw == 0 and self._all_answered:
            self._close()  # no data was received
        else:
            reason = f"The headers must come within {self._limits.header_s:g} seconds"
            self._refuse(ApiError(408, "request_timeout", reason))

    def _body_is_late(self) -> None:
        self._timer = None
        received, self._body_seen = self._body - self._body_seen, self._body
        least = int(self._limits.body_s * BODY_RATE)
        if self.flow.read_paused or received >= least:
            self._start_timer(self._limits.body_s, self._body_is_late)
        else:
            reason = f"A body must arrive with at least {least} bytes in {self._limits.body_s:g} seconds"
            self._refuse(ApiError(408, "request_timeout", reason))

    def _refuse(self, error: ApiError) -> None:
        """Close the connection, with an error response unless it could be taken for another request's."""
        logger.debug("a connection is closed %s: %s", self._state, error.message)
        self._ended = True
        self._stop_timer()
        # In a body, uvicorn's `cycle` belongs to this request. In headers, it belongs to the previous one.
        own = self.cycle is not None and self._state == BODY and not self.pipeline
        can_respond = self._all_answered or (own and not self.cycle.response_started)
        self._disconnect()
        self.pipeline.clear()
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if can_respond:
            self.transport.write(error_bytes(error))
        if can_respond and self.transport.can_write_eof():
            self.transport.write_eof()
            self._start_timer(LINGER_S, self._close)
        else:
            self._close()

    def _disconnect(self) -> None:
        """Tell the running request that its client has disconnected."""
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.waiting_for_100_continue = False
            self._running.message_event.set()

    def _close(self) -> None:
        self._timer = None
        self.transport.close()
        self._abort_when_unread()

    def _abort_when_unread(self) -> None:
        """If its client does not read the rest of the response in time."""
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self._limits.write_s, self.transport.abort)

    def _start_timer(self, seconds: float, then: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, then)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
