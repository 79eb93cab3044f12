"""Member: one server of a fleet, as called by the front. Does not need Ray."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.types import Message

from manylora.errors import RequestError
from manylora.fleet.remote_http import RemoteRequest, RemoteResponse, answer, whole_answer
from manylora.lora.catalog.shared import SharedAdapters, State
from manylora.openai.api.errors import as_api_error
from manylora.openai.serving.transport import error_response

FOLLOW_S = 10.0  # to wait for an adapter change that this server has not seen yet


@dataclass(frozen=True)
class Changed:
    """The change made by a request. name: "": no change. revision: of the record after it."""

    answer: RemoteResponse
    name: str
    revision: int


class Member:
    """app: of `manylora serve`, already running. name: of this server among the others."""

    def __init__(self, app: Starlette, name: str) -> None:
        self._app, self._name = app, name
        self._shared: SharedAdapters | None = app.state.routes.context.shared

    async def answer(self, call: RemoteRequest) -> AsyncIterator[list[Message]]:
        await self._follow(call)
        async for messages in answer(self._app, call):
            for one in messages:
                if one["type"] == "http.response.start":
                    one["headers"] = [*one["headers"], (b"x-manylora-replica", self._name.encode())]
            yield messages

    async def whole_answer(self, call: RemoteRequest) -> RemoteResponse:
        await self._follow(call)
        return await whole_answer(self._app, call, self._name)

    async def change(self, call: RemoteRequest) -> Changed:
        """The response to a request that may change adapters. The other servers have not followed yet."""
        assert self._shared is not None
        try:
            async with self._shared.changing():
                found = await whole_answer(self._app, call, self._name)
                name = self._shared.changed
            return Changed(found, name, self._shared.revision)
        except RequestError as error:
            problem = as_api_error(error)
            response = error_response(problem)
            told = RemoteResponse(self._name, problem.status, response.raw_headers, bytes(response.body))
            return Changed(told, "", self._shared.revision)

    async def look(self, name: str, revision: int, drain_s: float) -> State:
        """Follow the record to this revision, then return what the name means here. drain_s: time for running
        requests when their adapter is unloaded.
        """
        assert self._shared is not None
        try:
            await self._shared.look(revision)
            return await self._shared.state(name, drain_s)
        except Exception as error:
            return State(self._shared.revision, problem=as_api_error(error).message)

    async def _follow(self, call: RemoteRequest) -> None:
        if self._shared is not None and call.revision > self._shared.revision:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._shared.look(call.revision), FOLLOW_S)
