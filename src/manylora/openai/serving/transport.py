"""Between HTTP and the rest: bodies within a limit, clients that leave, streams of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from manylora.openai.api.errors import ApiError
from manylora.system.allocator import give_back

__all__ = ["Bodies", "EventStream", "content_type", "error_response", "read_body", "watch"]

SMALL = 2**16  # bytes of a body that is not counted
LARGE = 2**20  # bytes of one whose memory is given back, when it has been read
GIVE_BACK_S = 0.5  # afterwards, once for all until then
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # a proxy must not gather the events


def content_type(request: Request) -> str:
    """Without its parameters; empty: none is given."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


class Bodies:
    """What all bodies together take while they come. Event loop only. Small ones are not counted, so that
    many large ones are in the way of large ones only."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._giving: asyncio.TimerHandle | None = None
        self.num_bytes = 0

    @contextmanager
    def open(self) -> Iterator[Callable[[int], None]]:
        """For one body: a function that is told how long it is by now, and raises ApiError."""
        counted = 0

        def hold(length: int) -> None:
            nonlocal counted
            more = max(0, length - SMALL) - counted
            if more > 0 and self.num_bytes + more > self._max_bytes:
                reason = "Too many large requests are coming in, try again"
                raise ApiError(429, "overloaded", reason, retry_after=1)
            self.num_bytes += more
            counted += more

        try:
            yield hold
        finally:
            self.num_bytes -= counted
            if counted > LARGE and self._giving is None:
                self._giving = asyncio.get_running_loop().call_later(GIVE_BACK_S, self._give_back)

    def _give_back(self) -> None:
        self._giving = None
        give_back()


async def read_body(request: Request, max_bytes: int, hold: Callable[[int], None]) -> bytearray:
    """hold: of `Bodies.open`. Raises ApiError: 413 over the limit, 415 for another content type than JSON."""
    if content_type(request) != "application/json":
        raise ApiError(415, "unsupported_media_type", "The Content-Type must be application/json")
    too_large = ApiError(413, "request_too_large", f"The body must have at most {max_bytes} bytes")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > max_bytes:
        raise too_large
    body = bytearray()
    async for piece in request.stream():
        body += piece
        hold(len(body))
        if len(body) > max_bytes:
            raise too_large
    return body


def watch(receive: Receive, left: Callable[[], None]) -> asyncio.Task[None]:
    """Call `left` when the client closes the connection. The body must have been read; to be cancelled."""

    async def wait() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        left()

    return asyncio.create_task(wait())


class EventStream(Response):
    """Server-sent events. watcher: of the client, ended with the stream; close: called at its end."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[bytes], watcher: asyncio.Task[None], close: Callable[[], None]
    ) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._events, self._watcher, self._close = events, watcher, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._watcher.cancel()
            self._close()


def error_response(error: ApiError) -> JSONResponse:
    body: dict[str, Any] = error.body()
    return JSONResponse(body, error.status, headers=error.headers)
