"""The front of a fleet: an ASGI application that forwards every request to one of the replicas. Requests that
change adapters are executed by one replica, and all others follow."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from manylora.adapters.catalog.names import Aliases
from manylora.adapters.catalog.uploads import AdapterRecord, Uploads
from manylora.doors.fleet.calls import LOST, NOT_TAKEN, Relay, call_all, not_taken
from manylora.doors.fleet.member import (
    Changed,
    RemoteRequest,
    change_response,
    fleet_status,
    merge_metrics,
)
from manylora.doors.fleet.options import FleetOptions
from manylora.doors.fleet.routing import requested_adapter
from manylora.doors.http.adapter_routes import ADAPTER_ROUTES
from manylora.doors.http.api.errors import ApiError
from manylora.doors.http.api.parsing import read_object
from manylora.doors.http.app import COUNTED, cors, failed
from manylora.doors.http.serving import transport
from manylora.doors.http.serving.keys import ApiKey, Keyring
from manylora.doors.http.serving.metrics import CONTENT_TYPE

Answers = dict[str, tuple[Response, dict[str, Any]]]
Handler = Callable[[Request], Awaitable[Response]]
APPLICATION, DEPLOYMENT = "manylora", "Replicas"
STATES_AGE_S = 1.0
BODIES_AT_ONCE = 16
CHANGE_S = 120.0  # for one replica to read the adapter and make the change
FOLLOW_S = 60.0  # for the others to read it
NO_FOLDER = (
    "This fleet has no folder that its servers share, so requests cannot change adapters: give "
    "--lora-upload-dir, or put adapters below --lora-root, which every server watches"
)
LATE = "The replica that was asked {what}: GET /v1/models/NAME says whether the adapter is there"


def make_front(options: FleetOptions, replicas: DeploymentHandle) -> Starlette:
    front = _Front(options, replicas)
    ready, any_method = _answered(front.ready), ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"]
    routes = [
        *(Route(path, front.live) for path in ("/health", "/health/live", "/v1/health/live")),
        *(Route(path, ready) for path in ("/health/ready", "/v1/health/ready", "/ping")),
        *(Route(path, _answered(front.change), methods=[method]) for method, path, _ in ADAPTER_ROUTES),
        Route("/metrics", _answered(front.metrics)),
        Route("/v1/cache", _answered(front.cache)),
        Route("/reset_prefix_cache", _answered(front.reset_prefix_cache), methods=["POST"]),
        Route("/{path:path}", _answered(front.forward), methods=any_method),
    ]
    return Starlette(routes=routes, middleware=cors(options))


def _answered(handle: Handler) -> Handler:
    """The same handler with responses to errors, which have the request's id."""

    async def answer(request: Request) -> Response:
        try:
            return await handle(request)
        except Exception as error:
            response = failed(request, request.url.path, error)
            response.headers["x-request-id"] = transport.request_id(request)
            return response

    return answer


class _Front:
    def __init__(self, options: FleetOptions, replicas: DeploymentHandle) -> None:
        self._options, self._replicas = options, replicas
        self._keyring = Keyring(
            options.api_keys, open_admin=options.allow_runtime_lora_updating, plain=options.api_key
        )
        self._body_memory = transport.BodyMemory(BODIES_AT_ONCE * options.max_request_bytes)
        self._counts: Counter[str] = Counter()
        self._states: dict[str, int] = {}
        self._states_at = float("-inf")
        folder = options.shared_dir
        self._record = None if folder is None else AdapterRecord(folder)
        self._uploads = Uploads(options.lora_upload_bytes if folder else 0, folder, self._record)
        self._revision = 0  # of the record, which every replica must know before it answers
        self._aliases = Aliases(dict(options.lora_alias))  # from options and requests
        self._learn()

    async def forward(self, request: Request) -> Response:
        body = await self._body(request)
        call = RemoteRequest.of(request, body, self._revision)
        adapter = None
        if request.method == "POST":
            with contextlib.suppress(ApiError):  # the replica reports what is wrong
                bases = (*self._options.bases, *self._options.paths)
                adapter = requested_adapter(read_object(body), bases, self._aliases)
        with ExitStack() as stack:
            stack.enter_context(self._limit(request))
            relay = Relay(self._replicas, call, adapter, self._counts)
            watcher = transport.watch(request.receive, relay.leave)
            stack.callback(watcher.cancel)
            await relay.begin()
            relay.on_end = stack.pop_all().close
            return relay

    async def _body(self, request: Request) -> bytearray:
        with self._body_memory.reserve() as grow:
            return await transport.read_body(request, self._options.max_request_bytes, grow, any_type=True)

    def _limit(self, request: Request) -> AbstractContextManager[None]:
        """Count a key's limits, which hold for the whole fleet. A replica refuses requests without a key."""
        if request.url.path in COUNTED:
            with contextlib.suppress(ApiError):
                return self._keyring.identify(transport.credentials(request)).request()
        return nullcontext()

    async def change(self, request: Request) -> Response:
        key = self._keyring.loader(request.headers.get("authorization", ""))
        if self._record is None:
            raise ApiError(403, "not_allowed", NO_FOLDER)
        takes_file = request.method == "PUT" or "/load_" in request.url.path
        if not takes_file or transport.content_type(request) != "application/octet-stream":
            return await self._spread(request, RemoteRequest.of(request, await self._body(request)))
        # The body is written to the shared folder. The replica checks what it is, and whose.
        transport.check_encoding(request)
        path = await self._uploads.receive(_bounded(request, key), transport.declared_length(request))
        try:
            return await self._spread(request, RemoteRequest.of(request, received=str(path)))
        finally:
            self._uploads.drop(path)  # no effect once a replica has placed it

    async def _spread(self, request: Request, call: RemoteRequest) -> Response:
        try:
            asked = self._replicas.options(method_name="change").remote(call)
            changed: Changed = await asyncio.wait_for(asked, CHANGE_S)
        except (TimeoutError, asyncio.TimeoutError) as error:
            what = f"has not answered within {CHANGE_S:.0f} s"
            raise ApiError(503, "replica_late", LATE.format(what=what), retry_after=1) from error
        except LOST as error:
            raise ApiError(503, "replica_lost", LATE.format(what="has ended"), retry_after=1) from error
        except NOT_TAKEN as error:
            raise not_taken(error) from error
        if not changed.name and changed.revision <= self._revision:
            return change_response(changed, request.method, request.url.path, {}, ())
        drain_s = self._options.drain_seconds
        told, most = (changed.name, changed.revision, drain_s), max(FOLLOW_S, drain_s + 5)
        states, missing = await call_all(self._replicas, "look", *told, longest_s=most)
        self._learn()
        self._revision = max(self._revision, changed.revision)
        return change_response(changed, request.method, request.url.path, states, missing)

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
        self._aliases = Aliases(found)
        self._revision = self._revision or self._record.revision

    async def live(self, request: Request) -> Response:
        return JSONResponse({"status": "live"})

    async def ready(self, request: Request) -> Response:
        if not (await self._replica_states()).get("RUNNING"):
            raise ApiError(503, "engine_unavailable", "No replica is ready", retry_after=1)
        return JSONResponse({"status": "ready"})

    async def _ask_all(self, request: Request) -> tuple[Response | None, Answers, tuple[str, ...]]:
        """The answers of all replicas that answer within ALL_S, with their reports, by name, and those that
        do not. First a refusal, if there is one: all judge a request and its key in the same way."""
        call = RemoteRequest.of(request)
        if request.method == "GET":  # replicas number their points differently, so request all of them
            call = replace(call, scope={**call.scope, "query_string": b""})
        given, missing = await call_all(self._replicas, "reported_answer", call)
        if not given:
            raise ApiError(503, "engine_unavailable", "No replica answers at the moment", retry_after=1)
        for answer, _ in given.values():
            if answer.status_code != 200:
                return answer, given, missing
        return None, given, missing

    async def reset_prefix_cache(self, request: Request) -> Response:
        refused, _, missing = await self._ask_all(request)
        if refused is None and missing:
            reason = f"These replicas did not answer: {', '.join(missing)}"
            raise ApiError(503, "replica_late", reason, retry_after=1)
        return refused or Response()

    async def metrics(self, request: Request) -> Response:
        refused, given, missing = await self._ask_all(request)
        if refused is not None:
            return refused
        states = (await self._replica_states()).items()
        counts = [(f'state="{state.lower()}"', count) for state, count in states]
        lines = _gauge("manylora_fleet_replicas", "Replicas by Ray's name of their state", counts)
        present = [(f'replica="{name}"', int(name in given)) for name in sorted({*given, *missing})]
        help_text = "1: this replica's metrics are here; 0: it has not answered in time"
        lines += _gauge("manylora_fleet_replica_up", help_text, present)
        for name, text in Relay.COUNTERS.items():
            lines += [f"# HELP {name} {text}", f"# TYPE {name} counter", f"{name} {self._counts[name]}"]
        merged = merge_metrics({name: bytes(one.body).decode() for name, (one, _) in given.items()})
        return PlainTextResponse(merged + "\n".join(lines) + "\n", media_type=CONTENT_TYPE)

    async def cache(self, request: Request) -> Response:
        refused, given, missing = await self._ask_all(request)
        if refused is not None:
            return refused
        after = transport.query_number(request, "points_after")
        status = fleet_status(given, await self._replica_states(), time.time(), after)
        status["missing"] = list(missing)
        return JSONResponse(status, headers={"Cache-Control": "no-store"})

    async def _replica_states(self) -> dict[str, int]:
        if time.monotonic() - self._states_at > STATES_AGE_S:
            self._states_at = time.monotonic()
            self._states = await asyncio.get_running_loop().run_in_executor(None, _replica_states)
        return self._states


def _replica_states() -> dict[str, int]:
    for application in serve.status().applications.values():
        if found := application.deployments.get(DEPLOYMENT):
            return {str(getattr(state, "value", state)): n for state, n in found.replica_states.items()}
    return {}


async def _bounded(request: Request, key: ApiKey) -> AsyncIterator[bytes]:
    """Limit the body to all that a key may own. A replica later checks how much the key already owns."""
    received = 0
    async for piece in request.stream():
        received += len(piece)
        if not key.admin and key.max_adapter_bytes and received > key.max_adapter_bytes:
            text = f"Adapters of this API key may have {key.max_adapter_bytes} bytes (max_adapter_bytes)"
            raise ApiError(403, "quota_exceeded", text)
        yield piece


def _gauge(name: str, help_text: str, samples: Sequence[tuple[str, int]]) -> list[str]:
    """Lines of a Prometheus text. Empty without samples. samples: labels and value."""
    lines = [f"{name}{{{labels}}} {value}" for labels, value in samples]
    return [f"# HELP {name} {help_text}", f"# TYPE {name} gauge", *lines] if lines else []
