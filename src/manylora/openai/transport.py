"""Between HTTP and the rest: bodies within a limit, clients that leave, streams of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from manylora.openai.errors import ApiError

__all__ = ["EventStream", "content_type", "error_response", "read_body", "watch"]

HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # a proxy must not gather the events


def content_type(request: Request) -> str:
    """Without its parameters; empty: none is given."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Raises ApiError: 413 over the limit, 415 for another content type than JSON."""
    if content_type(request) != "application/json":
        raise ApiError(415, "unsupported_media_type", "The Content-Type must be application/json")
    too_large = ApiError(413, "request_too_large", f"The body must have at most {max_bytes} bytes")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > max_bytes:
        raise too_large
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > max_bytes:
            raise too_large
    return bytes(body)


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
