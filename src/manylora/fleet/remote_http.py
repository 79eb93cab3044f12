"""An HTTP request and its response as data, for an ASGI application in another process. Does not need Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message

from manylora.lora.catalog.names import LATEST, Aliases
from manylora.openai.adapter_routes import RECEIVED

LEAVE_S = 5.0  # for an application to notice that its client has left, before it is cancelled
COPIED = ("http_version", "method", "scheme", "path", "raw_path", "query_string", "client", "server")


@dataclass(frozen=True)
class RemoteRequest:
    """scope: the serialisable part of the ASGI scope. body: complete. revision: of the adapter record, which
    the response must take into account. received: the file that the body was written to; "": none.
    """

    scope: dict[str, Any]
    headers: list[tuple[bytes, bytes]]
    body: bytes
    revision: int = 0
    received: str = ""

    @classmethod
    def of(
        cls, request: Request, body: bytes | bytearray = b"", revision: int = 0, received: str = ""
    ) -> RemoteRequest:
        scope = {name: request.scope[name] for name in COPIED if name in request.scope}
        return cls(scope, list(request.scope["headers"]), bytes(body), revision, received)


@dataclass(frozen=True)
class RemoteResponse:
    """A complete response of one replica."""

    replica: str
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


async def answer(app: ASGIApp, call: RemoteRequest) -> AsyncIterator[list[Message]]:
    """The ASGI messages of its response, in batches of all that are available. If the iterator is closed
    early, the application sees that the client disconnected.
    """
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    gone = asyncio.Event()
    body: list[Message] = [{"type": "http.request", "body": call.body, "more_body": False}]

    async def receive() -> Message:
        if body:
            return body.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def run() -> None:
        try:
            own = {"type": "http", "headers": call.headers, RECEIVED: call.received}
            await app({**call.scope, **own}, receive, messages.put)
        finally:
            messages.put_nowait(None)

    task = asyncio.create_task(run())
    try:
        last = False
        while not last:
            found = [await messages.get()]
            while not messages.empty():
                found.append(messages.get_nowait())
            last = found[-1] is None
            if news := [one for one in found if one is not None]:
                yield news
        await task
    finally:
        gone.set()
        if not task.done():
            await asyncio.wait({task}, timeout=LEAVE_S)
            task.cancel()


async def whole_answer(app: ASGIApp, call: RemoteRequest, replica: str) -> RemoteResponse:
    status, headers, body = 500, [], bytearray()
    async for messages in answer(app, call):
        for one in messages:
            if one["type"] == "http.response.start":
                status, headers = one["status"], list(one["headers"])
            else:
                body += one.get("body", b"")
    return RemoteResponse(replica, status, headers, bytes(body))


def requested_adapter(fields: Mapping[str, Any], bases: Sequence[str], aliases: Aliases) -> str | None:
    """The adapter's name; None: the base model. For a mix the first adapter, so that equal mixes go to one
    replica.

    fields: of the body, not validated. A wrong guess only costs a cold load.
    """
    lora, request = fields.get("lora"), fields.get("lora_request")
    named = [fields.get(name) for name in ("lora_model", "adapter_id", "lora_path")]
    named.append(request.get("lora_name") if isinstance(request, dict) else None)
    first = lora[0] if isinstance(lora, list) and lora else None
    named.append(first.get("name") if isinstance(first, dict) else None)
    name = _first_name([*named, fields.get("model")], bases)
    meant = None if name is None else aliases.resolve(name)
    return None if meant in bases else meant


def _first_name(named: Sequence[Any], bases: Sequence[str]) -> str | None:
    for one in named:
        if not isinstance(one, str) or not one:
            continue
        name = one.removesuffix(LATEST)
        base = next((base for base in bases if name == base or name.startswith(base + ":")), None)
        name = name if base is None else name[len(base) + 1 :]
        return name.partition("+")[0] or None  # adapter names never contain a +
    return None
