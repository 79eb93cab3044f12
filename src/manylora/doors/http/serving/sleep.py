"""vLLM's routes that free an idle engine's memory and get it back: /sleep, /wake_up, /is_sleeping."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from manylora.doors.http.api.errors import ApiError, invalid_value, unsupported_field
from manylora.doors.http.serving.backend import EngineClient
from manylora.doors.http.serving.keys import ApiKey, Keyring

if TYPE_CHECKING:
    from manylora.engine.loop import EngineLoop

SLEEP_ROUTES = [
    ("POST", "/sleep", "sleeping.sleep"),
    ("POST", "/wake_up", "sleeping.wake_up"),
    ("GET", "/is_sleeping", "sleeping.is_sleeping"),
]


class SleepRoutes:
    """enabled: --enable-sleep-mode. The methods raise ApiError."""

    def __init__(self, engine: EngineClient, keyring: Keyring, enabled: bool) -> None:
        self._engine, self._keyring, self._enabled = engine, keyring, enabled

    async def sleep(self, request: Request, key: ApiKey) -> Response:
        """Answers once the open requests have ended and memory is free."""
        loop, query = self._loop(request, key), request.query_params
        level = query.get("level", "1")
        if level not in ("1", "2"):
            raise invalid_value("level must be 1 or 2", "level")
        if query.get("mode", "wait") != "wait":
            raise unsupported_field("mode must be wait: open requests are finished first", "mode")
        await asyncio.wrap_future(loop.sleep(int(level)))
        return Response()

    async def wake_up(self, request: Request, key: ApiKey) -> Response:
        loop = self._loop(request, key)
        await asyncio.wrap_future(loop.wake_up(request.query_params.getlist("tags") or None))
        return Response()

    async def is_sleeping(self, request: Request, key: ApiKey) -> Response:
        return JSONResponse({"is_sleeping": self._loop(request).is_sleeping})

    def _loop(self, request: Request, key: ApiKey | None = None) -> EngineLoop:
        """key: that changes something."""
        if not self._enabled:
            raise ApiError(404, "not_found", f"{request.url.path} needs --enable-sleep-mode")
        if key is not None:
            self._keyring.check_operator(key)
        loop = self._engine.loop
        assert loop is not None  # enable_sleep_mode is refused with triton_url
        return loop
