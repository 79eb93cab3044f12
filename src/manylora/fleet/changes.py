"""Changes: requests that change adapters. One replica executes them, and all others follow."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from pathlib import Path

from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response

from manylora.fleet.broadcast import call_all
from manylora.fleet.change_response import change_response
from manylora.fleet.member import Changed
from manylora.fleet.options import FleetOptions
from manylora.fleet.relay import LOST, NOT_TAKEN, not_taken
from manylora.fleet.remote_http import RemoteRequest
from manylora.lora.catalog.names import Aliases
from manylora.lora.catalog.record import AdapterRecord
from manylora.lora.catalog.uploads import Uploads
from manylora.openai.api.errors import ApiError
from manylora.openai.serving.keys import ApiKey, Keyring
from manylora.openai.serving.transport import check_encoding, content_type, declared_length, read_body

CHANGE_S = 120.0  # for one replica to read the adapter and make the change
FOLLOW_S = 60.0  # for the others to read it
NO_FOLDER = (
    "This fleet has no folder that its servers share, so requests cannot change adapters: give "
    "--lora-upload-dir, or put adapters below --lora-root, which every server watches"
)
LATE = "The replica that was asked {what}: GET /v1/models/NAME says whether the adapter is there"


class Changes:
    """reserve: of `BodyMemory`. revision: of the record, which every replica must know before it answers.
    aliases: from options and requests.
    """

    def __init__(
        self,
        options: FleetOptions,
        replicas: DeploymentHandle,
        keyring: Keyring,
        reserve: Callable[[], AbstractContextManager[Callable[[int], None]]],
    ) -> None:
        self._options, self._replicas, self._keyring, self._reserve = options, replicas, keyring, reserve
        folder = options.shared_dir
        self._record = None if folder is None else AdapterRecord(folder)
        self._uploads = Uploads(options.lora_upload_bytes if folder else 0, folder, self._record)
        self.revision = 0
        self.aliases = Aliases(dict(options.lora_alias))
        self._learn()

    async def handle(self, request: Request) -> Response:
        """Raises ApiError."""
        key = self._keyring.loader(request.headers.get("authorization", ""))
        if self._record is None:
            raise ApiError(403, "not_allowed", NO_FOLDER)
        takes_file = request.method == "PUT" or "/load_" in request.url.path
        if not takes_file or content_type(request) != "application/octet-stream":
            with self._reserve() as grow:
                body = await read_body(request, self._options.max_request_bytes, grow, any_type=True)
            return await self._spread(request, RemoteRequest.of(request, body))
        path = await self._receive(request, key)
        try:
            return await self._spread(request, RemoteRequest.of(request, received=str(path)))
        finally:
            self._uploads.drop(path)  # no effect once a replica has placed it

    async def _receive(self, request: Request, key: ApiKey) -> Path:
        """Write the body to the shared folder. The replica checks what it is, and whose. Raises ApiError."""
        check_encoding(request)
        return await self._uploads.receive(_bounded(request, key), declared_length(request))

    async def _spread(self, request: Request, call: RemoteRequest) -> Response:
        changed = await self._change(call)
        if not changed.name and changed.revision <= self.revision:
            return change_response(changed, request.method, request.url.path, {}, ())
        drain_s = self._options.drain_seconds
        states, missing = await call_all(
            self._replicas,
            "look",
            changed.name,
            changed.revision,
            drain_s,
            longest_s=max(FOLLOW_S, drain_s + 5),
        )
        self._learn()
        self.revision = max(self.revision, changed.revision)
        return change_response(changed, request.method, request.url.path, states, missing)

    async def _change(self, call: RemoteRequest) -> Changed:
        """Raises ApiError."""
        response = self._replicas.options(method_name="change").remote(call)
        try:
            changed: Changed = await asyncio.wait_for(response, CHANGE_S)
            return changed
        except (TimeoutError, asyncio.TimeoutError) as error:
            what = f"has not answered within {CHANGE_S:.0f} s"
            raise ApiError(503, "replica_late", LATE.format(what=what), retry_after=1) from error
        except LOST as error:
            raise ApiError(503, "replica_lost", LATE.format(what="has ended"), retry_after=1) from error
        except NOT_TAKEN as error:
            raise not_taken(error) from error

    def _learn(self) -> None:
        """Load aliases that requests, also to an earlier fleet, have made and removed."""
        if self._record is None:
            return
        with contextlib.suppress(OSError):  # a wrong guess of an adapter only costs a load
            self._record.read()
        found = dict(self._options.lora_alias)
        for name, kept in self._record.names.items():
            if kept.kind == "alias":
                found[name] = kept.target
            else:
                found.pop(name, None)
        self.aliases = Aliases(found)
        self.revision = self.revision or self._record.revision


async def _bounded(request: Request, key: ApiKey) -> AsyncIterator[bytes]:
    """Limit the body to all that a key may own. A replica later checks how much the key already owns."""
    received = 0
    async for piece in request.stream():
        received += len(piece)
        if not key.admin and key.max_adapter_bytes and received > key.max_adapter_bytes:
            text = f"Adapters of this API key may have {key.max_adapter_bytes} bytes (max_adapter_bytes)"
            raise ApiError(403, "quota_exceeded", text)
        yield piece
