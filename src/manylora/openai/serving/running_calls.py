"""RunningCalls: the calls of one HTTP request, from start to response or stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from starlette.requests import Request

from manylora.openai.api.errors import ApiError, client_left
from manylora.openai.serving.backend import Backend, Call
from manylora.openai.serving.responses import ResponseBuilder
from manylora.openai.serving.transport import watch
from manylora.openai.serving.waits import Signal


class RunningCalls:
    """The calls of one HTTP request. They are cancelled when the client disconnects.

    on_disconnect: called if that happens during a stream. None if the response's status is counted.
    """

    def __init__(
        self,
        backend: Backend,
        calls: Sequence[Call[Any]],
        changed: Signal,
        request: Request,
        on_disconnect: Callable[[], None] | None,
    ) -> None:
        self._on_disconnect = on_disconnect
        self._streaming = False
        self._backend, self._calls, self._changed = backend, calls, changed
        self._disconnected = False
        self.watcher = watch(request.receive, self._set_disconnected)

    async def begin(self) -> None:
        """Start, and wait for the first change: until then an error can still become an HTTP status."""
        for call in self._calls:
            self._backend.submit(call)
        await self._wait()

    async def finish(self) -> None:
        while not all(call.generation.finished for call in self._calls):
            await self._wait()

    async def stream(self, builder: ResponseBuilder, usage: bool) -> AsyncIterator[bytes]:
        self._streaming = True
        try:
            events = builder.first_events()
            if events:
                yield events
            while True:
                finished = all(call.generation.complete for call in self._calls)
                events = builder.new_events()
                if finished:
                    break
                if events:
                    yield events
                await self._wait()
            yield events + builder.last_events(usage)
            self._streaming = False
        except ApiError as error:
            if error.status != 499:
                self._streaming = False
            yield builder.error_events(error)

    def close(self) -> None:
        if self._streaming and self._on_disconnect is not None:  # the stream is not complete
            self._on_disconnect()
        self.watcher.cancel()
        for call in self._calls:
            if not call.generation.ended:
                self._backend.cancel(call)

    async def _wait(self) -> None:
        """Wait for a change. Raises ApiError if a call failed or the client disconnected."""
        await self._changed.wait()
        if self._disconnected:
            raise client_left()
        for call in self._calls:
            if call.error is not None:
                raise call.error

    def _set_disconnected(self) -> None:
        self._disconnected = True
        self._changed.set()
