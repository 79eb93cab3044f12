"""Routes of OpenAI's Files and Batch APIs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from shutil import copyfileobj
from typing import Any

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from manylora.doors.http.api.errors import ApiError, invalid_value
from manylora.doors.http.api.schema import BatchRequest
from manylora.doors.http.batches.lines import ENDPOINTS
from manylora.doors.http.batches.store import Batch, BatchStore, StoredFile
from manylora.doors.http.serving.keys import ApiKey
from manylora.doors.http.serving.transport import check_encoding, content_type, query_number

BATCH_ROUTES = [
    ("POST", "/v1/files", "batches.upload"),
    ("GET", "/v1/files", "batches.files"),
    ("GET", "/v1/files/{name}", "batches.file"),
    ("DELETE", "/v1/files/{name}", "batches.delete"),
    ("GET", "/v1/files/{name}/content", "batches.content"),
    ("POST", "/v1/batches", "batches.create"),
    ("GET", "/v1/batches", "batches.list"),
    ("GET", "/v1/batches/{name}", "batches.batch"),
    ("POST", "/v1/batches/{name}/cancel", "batches.cancel"),
]
"""HTTP method, path, method of BatchRoutes."""
FORM = ("file", "purpose")
MOST_SHOWN = {"file": 10_000, "batch": 100}
SHOWN = {"file": 10_000, "batch": 20}


class BatchRoutes:
    def __init__(self, store: BatchStore) -> None:
        self._store = store

    async def upload(self, request: Request, key: ApiKey) -> Response:
        check_encoding(request)
        if content_type(request) != "multipart/form-data":
            reason = "The Content-Type must be multipart/form-data, with the fields file and purpose"
            raise ApiError(415, "unsupported_media_type", reason)
        try:
            stream = self._store.counted(request.stream())
            form = await MultiPartParser(request.headers, stream, max_files=1, max_fields=2).parse()  # type: ignore[arg-type]
        except (MultiPartException, HTTPException, KeyError) as error:
            reason = getattr(error, "message", "") or "it is no multipart/form-data"
            raise ApiError(400, "invalid_form", f"The form cannot be read: {reason}") from error
        try:
            if unknown := sorted(form.keys() - set(FORM)):
                name = unknown[0][:80]
                raise invalid_value(f"{name} is not a field of the form: leave it out", name)
            file, purpose = form.get("file"), form.get("purpose")
            if not isinstance(file, UploadFile):
                reason = "file is required: a file with one request per line"
                raise ApiError(400, "missing_field", reason, "file")
            if purpose != "batch":
                raise invalid_value("purpose must be batch", "purpose")
            made = await self._store.add(
                key.name, file.filename or "batch.jsonl", "batch", partial(copyfileobj, file.file)
            )
        finally:
            await form.close()
        return JSONResponse(made.card())

    async def files(self, request: Request, key: ApiKey) -> Response:
        purpose = request.query_params.get("purpose")
        found = [one for one in _own(self._store.files, key) if purpose in (None, one.purpose)]
        return _page(request, found, "file")

    async def file(self, request: Request, key: ApiKey) -> Response:
        return JSONResponse(self._file(request.path_params["name"], key).card())

    async def delete(self, request: Request, key: ApiKey) -> Response:
        file = self._file(request.path_params["name"], key)
        self._store.delete(file)
        return JSONResponse({"id": file.id, "object": "file", "deleted": True})

    async def content(self, request: Request, key: ApiKey) -> Response:
        file = self._file(request.path_params["name"], key)
        return FileResponse(self._store.path(file), media_type="application/octet-stream")

    async def create(self, request: Request, body: BatchRequest, key: ApiKey) -> Response:
        if body.endpoint not in ENDPOINTS:
            raise invalid_value(f"endpoint must be one of {', '.join(ENDPOINTS)}", "endpoint")
        file = self._file(body.input_file_id, key)
        return JSONResponse(self._store.create(key, file, body.endpoint, body.metadata).card())

    async def list(self, request: Request, key: ApiKey) -> Response:
        return _page(request, _own(self._store.batches, key), "batch")

    async def batch(self, request: Request, key: ApiKey) -> Response:
        return JSONResponse(_one(self._store.batches, request.path_params["name"], key, "batch").card())

    async def cancel(self, request: Request, key: ApiKey) -> Response:
        batch: Batch = _one(self._store.batches, request.path_params["name"], key, "batch")
        self._store.cancel(batch)
        return JSONResponse(batch.card())

    def _file(self, name: str, key: ApiKey) -> StoredFile:
        found: StoredFile = _one(self._store.files, name, key, "file")
        return found


def _one(known: Mapping[str, Any], name: str, key: ApiKey, what: str) -> Any:
    """Raises ApiError 404, also for what belongs to another key."""
    found = known.get(name)
    if found is None or not (key.admin or found.owner == key.name):
        raise ApiError(404, "not_found", f"{what} {name[:80]!r} does not exist")
    return found


def _own(known: Mapping[str, Any], key: ApiKey) -> list[Any]:
    """Those of the key, the latest first."""
    found = [one for one in known.values() if key.admin or one.owner == key.name]
    return sorted(found, key=lambda one: one.created_at, reverse=True)


def _page(request: Request, found: list[Any], what: str) -> Response:
    """The part of a list that `after`, `limit` and `order` choose."""
    order, after = request.query_params.get("order", "desc"), request.query_params.get("after")
    if order not in ("asc", "desc"):
        raise invalid_value("order must be asc or desc", "order")
    limit = query_number(request, "limit") if "limit" in request.query_params else SHOWN[what]
    if not 1 <= limit <= MOST_SHOWN[what]:
        raise invalid_value(f"limit must be 1 to {MOST_SHOWN[what]}", "limit")
    found = found if order == "desc" else found[::-1]
    ids = [one.id for one in found]
    if after is not None:
        if after not in ids:
            raise invalid_value(f"after: {what} {after[:80]!r} does not exist", "after")
        found = found[ids.index(after) + 1 :]
    cards = [one.card() for one in found[:limit]]
    ends = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"]} if cards else {}
    return JSONResponse({"object": "list", "data": cards, "has_more": len(found) > limit, **ends})
