"""Relay: forwards a replica's response. If the replica is lost before the response starts, another one is
asked.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import ClassVar

from ray.exceptions import ObjectLostError, RayActorError, WorkerCrashedError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from manylora.fleet.remote_http import RemoteRequest
from manylora.openai.api.errors import ApiError, client_left

NOT_TAKEN = (BackPressureError, DeploymentUnavailableError)
LOST = (RayActorError, WorkerCrashedError, ObjectLostError)
TRIES = 5  # lost replicas after which a request fails
RETRIED = "manylora_fleet_retried_requests_total"
CUT = "manylora_fleet_cut_streams_total"


class Relay(Response):
    """on_end: called once, after the last byte or when the client has left."""

    COUNTERS: ClassVar[dict[str, str]] = {
        RETRIED: "Requests that were given to another replica, since theirs was lost",
        CUT: "Streams that ended with an error event, since their replica was lost",
    }

    def __init__(
        self, replicas: DeploymentHandle, call: RemoteRequest, adapter: str | None, counts: Counter[str]
    ) -> None:
        super().__init__()
        self._method = replicas.options(method_name="answer", stream=True)
        self._call, self._adapter, self._counts = call, adapter, counts
        self._answer: DeploymentResponseGenerator[list[Message]] | None = None
        self._begun: list[Message] = []
        self._left = False
        self.on_end: Callable[[], None] = lambda: None

    def leave(self) -> None:
        """The client has left: the replica can stop."""
        self._left = True
        if self._answer is not None:
            self._answer.cancel()

    async def begin(self) -> None:
        """Wait for the start of the body. Nothing has been sent until then, so another replica can still
        answer.

        Raises ApiError.
        """
        for attempt in range(TRIES):
            try:
                await self._first_messages()
                return
            except LOST as error:
                if self._left:
                    raise client_left() from error
                if attempt < TRIES - 1:
                    self._counts[RETRIED] += 1
            except NOT_TAKEN as error:
                raise not_taken(error) from error
            except RequestCancelledError as error:
                raise client_left() from error
        raise _unavailable()

    async def _first_messages(self) -> None:
        self._begun = []
        self._answer = self._method.remote(self._call, adapter=self._adapter)
        if self._left:
            self._answer.cancel()
        while not any(one["type"] == "http.response.body" for one in self._begun):
            self._begun += await anext(self._answer)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._answer is not None
        try:
            for one in self._begun:
                await send(one)
            async for messages in self._answer:
                for one in messages:
                    await send(one)
        except LOST:
            if not self._left:
                self._counts[CUT] += 1
                await self._send_error(send)
        except RequestCancelledError:
            if not self._left:
                raise
        finally:
            self.on_end()

    async def _send_error(self, send: Send) -> None:
        """Report the error in the format of the stream, so that a partial answer is not taken for a complete
        one.
        """
        headers = dict(self._begun[0]["headers"])
        kind = headers.get(b"content-type", b"").partition(b";")[0]
        error = ApiError(503, "replica_lost", "The replica that answered has ended: send the request again")
        if kind == b"text/event-stream":
            end = error.event() + b"data: [DONE]\n\n"
        elif kind == b"application/x-ndjson":
            end = json.dumps({"error": error.message}).encode() + b"\n"
        else:
            raise RuntimeError(error.message)  # closes the connection before its length is reached
        await send({"type": "http.response.body", "body": end, "more_body": False})


def not_taken(error: Exception) -> ApiError:
    """The answer to a request that no replica took. error: one of NOT_TAKEN."""
    if isinstance(error, BackPressureError):
        text = "Too many requests wait for a replica, try again later"
        return ApiError(429, "overloaded", text, retry_after=1)
    return _unavailable()


def _unavailable() -> ApiError:
    text = "The fleet cannot answer at the moment, try again"
    return ApiError(503, "engine_unavailable", text, retry_after=1)
