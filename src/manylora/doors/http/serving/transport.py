"""Reads bodies within limits, detects that a client disconnects, and sends server-sent events."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from manylora.doors.http.api.errors import ApiError, invalid_value
from manylora.system.resources import release_free_memory

SMALL = 2**16  # bytes per body that are not counted
LARGE = 2**20  # memory of bodies from this size on is returned to the system
GIVE_BACK_S = 0.5  # delay of that, once for all bodies until then
LONGEST_NUMBER = 18  # digits of a number in a query
SAFE_ID = re.compile("[!-~]{1,128}")
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # proxies must not buffer events


def content_type(request: Request) -> str:
    """The Content-Type without parameters; empty if there is none."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def request_id(request: Request) -> str:
    """The client's x-request-id if it is safe in headers and logs. Otherwise a new one, which is stored."""
    given = request.headers.get("x-request-id", "")
    if SAFE_ID.fullmatch(given):
        return given
    made: str = getattr(request.state, "request_id", "") or secrets.token_hex(16)
    request.state.request_id = made
    return made


def credentials(request: Request) -> str:
    """The Authorization header. Anthropic's clients may send the key in x-api-key instead."""
    key = request.headers.get("x-api-key")
    return request.headers.get("authorization") or (f"Bearer {key}" if key else "")


def query_number(request: Request, name: str) -> int:
    """A number in the query, or 0 if absent. Raises ApiError."""
    text = request.query_params.get(name, "0")
    if not (text.isascii() and text.isdigit() and len(text) <= LONGEST_NUMBER):
        raise invalid_value(f"{name} must be a number, 0 or more", name)
    return int(text)


def name_of(request: Request, chosen: str | None) -> str:
    """Suffix of a response's id: the client's x-request-id, or the body's request_id, or a new one."""
    given = request.headers.get("x-request-id", "")
    return given if SAFE_ID.fullmatch(given) else chosen or secrets.token_hex(12)


class BodyMemory:
    """Limits the memory of all bodies that are being received, except small ones. Event loop only."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._give_back_timer: asyncio.TimerHandle | None = None
        self.num_bytes = 0

    @contextmanager
    def reserve(self) -> Iterator[Callable[[int], None]]:
        """For one body: a function to call with its length so far. It raises ApiError 429 over the limit."""
        counted = 0

        def grow(length: int) -> None:
            nonlocal counted
            more = max(0, length - SMALL) - counted
            if more > 0 and self.num_bytes + more > self._max_bytes:
                reason = "Too many large requests are coming in, try again"
                raise ApiError(429, "overloaded", reason, retry_after=1)
            self.num_bytes += more
            counted += more

        try:
            yield grow
        finally:
            self.num_bytes -= counted
            if counted > LARGE and self._give_back_timer is None:
                self._give_back_timer = asyncio.get_running_loop().call_later(GIVE_BACK_S, self._give_back)

    def _give_back(self) -> None:
        self._give_back_timer = None
        release_free_memory()


def check_encoding(request: Request) -> None:
    """Raises ApiError 415 for a compressed body: a small one could expand to a very large one."""
    given = request.headers.get("content-encoding", "").strip().lower()
    if given not in ("", "identity"):
        reason = f"Content-Encoding {given[:40]!r} is not supported: send the body as it is"
        raise ApiError(415, "unsupported_media_type", reason)


def declared_length(request: Request) -> int:
    """The body's length from Content-Length. 0 if absent."""
    given = request.headers.get("content-length", "")
    return int(given) if given.isdigit() else 0


async def read_body(
    request: Request, max_bytes: int, grow: Callable[[int], None], *, any_type: bool = False
) -> bytearray:
    """any_type: whatever the Content-Type is. Raises ApiError: 413 over the limit, 415 if no JSON."""
    check_encoding(request)
    if not any_type and content_type(request) != "application/json":
        raise ApiError(415, "unsupported_media_type", "The Content-Type must be application/json")
    too_large = ApiError(413, "request_too_large", f"The body must have at most {max_bytes} bytes")
    if declared_length(request) > max_bytes:
        raise too_large
    body = bytearray()
    async for piece in request.stream():
        body += piece
        grow(len(body))
        if len(body) > max_bytes:
            raise too_large
    return body


def watch(receive: Receive, on_disconnect: Callable[[], None]) -> asyncio.Task[None]:
    """A task that calls on_disconnect when the client leaves. Cancel it when the response is complete."""

    async def wait() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        on_disconnect()

    return asyncio.create_task(wait())


class EventStream(Response):
    """Server-sent events, or lines of JSON. At its end `close` and the `on_close` are called."""

    def __init__(
        self,
        events: AsyncIterator[bytes],
        close: Callable[[], None],
        media_type: str = "text/event-stream",
    ) -> None:
        super().__init__(headers=HEADERS, media_type=media_type)
        del self.headers["content-length"]
        self._events, self.on_close = events, [close]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            for close in self.on_close:
                close()


def error_response(error: ApiError) -> JSONResponse:
    body: dict[str, Any] = error.body()
    return JSONResponse(body, error.status, headers=error.headers)
