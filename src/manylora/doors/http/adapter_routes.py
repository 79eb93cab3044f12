"""Routes that load, unload and pin adapters. They check who may do that, how many adapters, and how large."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from manylora.adapters.catalog.catalog import AdapterCatalog
from manylora.adapters.catalog.entry import Terms, Version
from manylora.adapters.catalog.names import targets_of
from manylora.adapters.catalog.pinning import Pinning
from manylora.adapters.catalog.shared import SharedAdapters
from manylora.adapters.catalog.uploads import Kept, Uploads
from manylora.doors.http.api.errors import ApiError, adapter_problem, as_api_error, check_name, invalid_value
from manylora.doors.http.api.parsing import api_error
from manylora.doors.http.api.schema import LoadRequest, LoadTerms, PinRequest, UnloadRequest
from manylora.doors.http.serving.keys import ApiKey, Keyring
from manylora.doors.http.serving.transport import check_encoding, content_type, declared_length
from manylora.errors import AdapterError, RequestError

ADAPTER_ROUTES = [
    ("POST", f"{prefix}/{path}_lora_adapter", f"adapters.{path}")
    for prefix in ("/v1", "")
    for path in ("load", "unload", "pin")
] + [
    ("PUT", "/v1/lora_adapters/{name:path}", "adapters.put"),
    ("DELETE", "/v1/lora_adapters/{name:path}", "adapters.delete"),
]
"""HTTP method, path, method of AdapterRoutes."""
RECEIVED = "manylora.received"  # in the scope of a request: the file that its body was written to


class AdapterRoutes:
    """read: parses a request's body. drain_s: time for running requests when their adapter is unloaded.
    shared: set if several servers have one catalog. Requests then run within `changing`, and the caller waits
    for the running requests on the other servers.
    """

    def __init__(
        self,
        read: Callable[..., Awaitable[Any]],
        keyring: Keyring,
        catalog: AdapterCatalog,
        uploads: Uploads,
        pinning: Pinning,
        drain_s: float,
        shared: SharedAdapters | None = None,
    ) -> None:
        self._read, self._keyring = read, keyring
        self._catalog, self._uploads, self._pinning = catalog, uploads, pinning
        self._drain_s, self._shared = drain_s if shared is None else 0.0, shared
        self._locks: dict[str, asyncio.Lock] = {}  # by owner: two concurrent loads could exceed a quota

    async def load(self, request: Request) -> Response:
        """Load by path, given as JSON, or with the adapter's file as the body and its name in the query."""
        key = self._loader(request)
        if content_type(request) == "application/octet-stream":
            name = check_name(request.query_params.get("lora_name", ""), "lora_name")
            query, known = _query_terms(request), self._catalog.has(name)
            version = await self._take_body(request, key, name, query)
            return await self._loaded(name, query.pinned, known, version.facts.notes)
        self._check_admin(key)
        body: LoadRequest = await self._read(request, LoadRequest)
        name = check_name(body.lora_name, "lora_name")
        if (body.lora_path is None) == (body.alias_of is None):
            reason = "lora_path or alias_of is required, one of them"
            raise ApiError(400, "missing_field", reason, "lora_path")
        if (target := body.alias_of) is not None:
            for field in ("pinned", "idle_ttl_seconds", "owner", "public"):
                if getattr(body, field):
                    raise invalid_value(f"{field}: an alias is as the adapter that it stands for", field)
            try:
                targets = targets_of(target)
            except ValueError as error:
                raise invalid_value(f"alias_of {error}", "alias_of") from error
            for one, _ in targets:
                key.check(check_name(one, "alias_of"), self._catalog.owner_of(one))
            self._catalog.load_alias(name, target, replace=body.load_inplace)
            self._keep(name)
            meant = " or ".join(map(repr, self._catalog.aliases.targets(name)))
            return PlainTextResponse(f"Success: {name!r} stands for {meant}.")
        assert body.lora_path is not None
        known = self._catalog.has(name)
        terms = self._terms(name, body, key)
        version = await self._catalog.load(name, body.lora_path, replace=body.load_inplace, terms=terms)
        return await self._loaded(name, body.pinned, known, version.facts.notes)

    async def put(self, request: Request) -> Response:
        """Load the adapter's file in the body under a new name or in place of an old version."""
        key = self._loader(request)
        if content_type(request) != "application/octet-stream":
            reason = "The body must be a safetensors file, sent as application/octet-stream"
            raise ApiError(415, "unsupported_media_type", reason)
        name = check_name(request.path_params["name"], "name")
        body, known = _query_terms(request).model_copy(update={"load_inplace": True}), self._catalog.has(name)
        version = await self._take_body(request, key, name, body)
        facts = version.facts
        await self._loaded(name, body.pinned, known, facts.notes)
        told = {"id": name, "object": "lora_adapter", "version": version.number, "digest": version.digest}
        told |= {"rank": facts.rank, "bytes": facts.num_bytes}
        return JSONResponse(told | ({"warnings": list(facts.notes)} if facts.notes else {}))

    async def _take_body(self, request: Request, key: ApiKey, name: str, body: LoadTerms) -> Version:
        check_encoding(request)
        self._check_own(name, key, new=True)
        if body.pinned:
            self._check_admin(key)
        terms = self._terms(name, body, key)
        self._catalog.check_new(name, replace=body.load_inplace)
        if received := request.scope.get(RECEIVED):  # the body was written to this file
            path = Path(received)
        else:
            length = declared_length(request)
            self._check_quota(name, key, length)
            path = await self._uploads.receive(self._bounded(request.stream(), name, key), length)

        def place(received: Path, digest: str) -> Path:
            self._check_quota(name, key, received.stat().st_size)
            number = self._catalog.versions.number(name, digest)
            return self._uploads.place(received, name, Kept("sent", terms, "", number, digest))

        try:
            async with self._locks.setdefault(key.name, asyncio.Lock()):
                if config := request.query_params.get("adapter_config", ""):
                    path = await asyncio.to_thread(self._uploads.add_config, path, config)
                return await self._catalog.load(
                    name, str(path), replace=body.load_inplace, move=place, terms=terms
                )
        except AdapterError as error:
            raise adapter_problem(name, str(error)) from error
        finally:
            self._uploads.drop(path)  # no effect after `place`

    async def unload(self, request: Request) -> Response:
        key = self._loader(request)
        name = check_name((await self._read(request, UnloadRequest)).lora_name, "lora_name")
        return unloaded(name, await self._unload(name, key))

    async def delete(self, request: Request) -> Response:
        key = self._loader(request)
        name = check_name(request.path_params["name"], "name")
        return deleted(name, await self._unload(name, key))

    async def _unload(self, name: str, key: ApiKey) -> int:
        """Returns how many requests are still running."""
        self._check_own(name, key)
        running = await self._catalog.unload(name, self._drain_s)
        await self._forget(name)
        return running

    async def _forget(self, name: str) -> None:
        """Drop everything that is stored for an unloaded adapter."""
        self._keep(name)
        self._uploads.discard(name)
        await self._pinning.follow()

    async def pin(self, request: Request) -> Response:
        self._check_admin(self._loader(request))
        body: PinRequest = await self._read(request, PinRequest)
        names = self._catalog.aliases.targets(check_name(body.lora_name, "lora_name"))
        for name in names:
            await (self._pinning.pin if body.pinned else self._pinning.unpin)(name)
            self._keep(name)
        shown, state = " and ".join(map(repr, names)), "is pinned" if body.pinned else "may be evicted"
        return PlainTextResponse(f"Success: LoRA adapter {shown} {state}.")

    async def _loaded(self, name: str, pinned: bool, known: bool, notes: Sequence[str]) -> Response:
        """known: whether the name existed. notes: warnings about settings that may not be what was meant."""
        self._keep(name)
        if pinned:
            try:
                await self._pinning.pin(name)
            except RequestError as error:
                if not known:
                    await self._catalog.unload(name, 0)
                    await self._forget(name)
                    raise
                found = as_api_error(error, name)
                text = f"It is loaded, but not pinned. {found.message}"
                raise ApiError(found.status, found.code, text, found.param, found.retry_after) from error
            self._keep(name)
        else:
            await self._pinning.follow()
        lines = [f"Success: LoRA adapter {name!r} added successfully."]
        return PlainTextResponse("\n".join([*lines, *(f"Warning: {note}" for note in notes)]))

    def _keep(self, name: str) -> None:
        """Record what a name means now, for other servers and for the next start. Raises ApiError."""
        if self._shared is not None:
            self._shared.note(name)
        elif self._uploads.folder is not None and self._catalog.has(name):
            self._uploads.keep_terms(name, self._catalog.entry(name).terms)

    def _terms(self, name: str, body: LoadTerms, key: ApiKey) -> Terms:
        """Raises ApiError."""
        older = self._catalog.entry(name).terms.owner if self._catalog.has(name) else ""
        owner = body.owner if body.owner is not None else older if key.admin else key.name
        if owner != key.name and not key.admin:
            raise ApiError(403, "not_allowed", "This API key may load for itself only", "owner")
        if body.owner and not self._keyring.has_name(owner):
            raise invalid_value(f"owner: no API key is called {owner!r}", "owner")
        return Terms(False, body.idle_ttl_seconds, owner, body.public)

    def _loader(self, request: Request) -> ApiKey:
        return self._keyring.loader(request.headers.get("authorization", ""))

    def _check_admin(self, key: ApiKey) -> None:
        """Raises ApiError."""
        if not key.admin:
            reason = "This API key may load adapters as request bodies, and unload its own; nothing else"
            raise ApiError(403, "not_allowed", reason)

    def _check_own(self, name: str, key: ApiKey, *, new: bool = False) -> None:
        """Whether a key may load or unload a name. Raises one ApiError for all reasons."""
        if key.admin:
            return
        free = new and not self._catalog.has(name) and name not in self._catalog.aliases
        own = self._catalog.has(name) and self._catalog.entry(name).terms.owner == key.name
        if not (key.may_see(name) and (free or own)):
            raise ApiError(403, "not_allowed", f"This API key may not use adapter {name!r}", "lora_name")

    def _check_quota(self, name: str, key: ApiKey, num_bytes: int) -> None:
        """Whether a key may own one more adapter of this size in bytes. Raises ApiError."""
        if key.admin:
            return
        others = [entry for entry in self._catalog.owned_by(key.name) if entry.name != name]
        if key.max_adapters and len(others) >= key.max_adapters:
            reason = f"This API key may own {key.max_adapters} adapters (max_adapters): unload one"
            raise ApiError(403, "quota_exceeded", reason)
        left = key.max_adapter_bytes - sum(entry.file_bytes for entry in others)
        if key.max_adapter_bytes and num_bytes > left:
            room = f"{max(0, left)} more of {key.max_adapter_bytes} bytes (max_adapter_bytes)"
            raise ApiError(403, "quota_exceeded", f"Adapters of this API key may have {room}: unload one")

    async def _bounded(self, stream: AsyncIterator[bytes], name: str, key: ApiKey) -> AsyncIterator[bytes]:
        received = 0
        async for piece in stream:
            received += len(piece)
            self._check_quota(name, key, received)
            yield piece


def unloaded(name: str, running: int) -> Response:
    """running: number of requests that are still running."""
    if running:
        text = f"LoRA adapter {name!r} takes no more requests; {running} are still under way."
        return PlainTextResponse(text, HTTPStatus.ACCEPTED)
    return PlainTextResponse(f"Success: LoRA adapter {name!r} removed successfully.")


def deleted(name: str, running: int) -> Response:
    """The same as a JSON object."""
    told = {"id": name, "object": "lora_adapter", "deleted": True, "running": running}
    return JSONResponse(told, HTTPStatus.ACCEPTED if running else HTTPStatus.OK)


def _query_terms(request: Request) -> LoadTerms:
    """Raises ApiError."""
    given = {name: value for name, value in request.query_params.items() if name in LoadTerms.model_fields}
    try:
        return LoadTerms.model_validate_strings(given, strict=False)
    except ValidationError as error:
        raise api_error(error) from error
