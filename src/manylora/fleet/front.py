"""The front of a fleet: an ASGI application that forwards every request to one of the replicas."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from manylora.fleet.broadcast import ask_all
from manylora.fleet.changes import Changes
from manylora.fleet.merged_exports import fleet_status, merge_metrics
from manylora.fleet.options import FleetOptions
from manylora.fleet.relay import Relay
from manylora.fleet.remote_http import RemoteRequest, RemoteResponse, requested_adapter
from manylora.openai.adapter_routes import ADAPTER_ROUTES
from manylora.openai.api.errors import ApiError
from manylora.openai.api.parsing import read_object
from manylora.openai.app import COUNTED
from manylora.openai.other_routes import failed
from manylora.openai.serving.keys import Keyring
from manylora.openai.serving.metrics import CONTENT_TYPE
from manylora.openai.serving.transport import (
    BodyMemory,
    credentials,
    query_number,
    read_body,
    request_id,
    watch,
)

APPLICATION, DEPLOYMENT = "manylora", "Replicas"
STATES_AGE_S = 1.0
BODIES_AT_ONCE = 16
LIVE = ("/health", "/health/live", "/v1/health/live")
READY = ("/health/ready", "/v1/health/ready", "/ping")


def make_front(options: FleetOptions, replicas: DeploymentHandle) -> Starlette:
    front = _Front(options, replicas)
    routes = [
        *(Route(path, front.live) for path in LIVE),
        *(Route(path, front.ready) for path in READY),
        *(Route(path, front.change, methods=[method]) for method, path, _ in ADAPTER_ROUTES),
        Route("/metrics", front.metrics),
        Route("/v1/cache", front.cache),
        Route("/{path:path}", front.forward, methods=["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"]),
    ]
    return Starlette(routes=routes, exception_handlers={ApiError: _api_error})


class _Front:
    def __init__(self, options: FleetOptions, replicas: DeploymentHandle) -> None:
        self._options, self._replicas = options, replicas
        self._keyring = Keyring(
            options.api_keys, open_admin=options.allow_runtime_lora_updating, plain=options.api_key
        )
        self._body_memory = BodyMemory(BODIES_AT_ONCE * options.max_request_bytes)
        self._changes = Changes(options, replicas, self._keyring, self._body_memory.reserve)
        self._counts: Counter[str] = Counter()
        self._states: dict[str, int] = {}
        self._states_at = float("-inf")

    async def forward(self, request: Request) -> Response:
        return await self._answered(request, self._forward)

    async def change(self, request: Request) -> Response:
        """A change that every replica must make."""
        return await self._answered(request, self._changes.handle)

    async def _forward(self, request: Request) -> Response:
        with self._body_memory.reserve() as grow:
            most = self._options.max_request_bytes
            body = await read_body(request, most, grow, any_type=True)
        call = RemoteRequest.of(request, body, self._changes.revision)
        return await self._relay(request, call, self._adapter(request, body))

    async def _answered(self, request: Request, handle: Callable[[Request], Awaitable[Response]]) -> Response:
        try:
            return await handle(request)
        except Exception as error:
            response = failed(request, request.url.path, error)
            response.headers["x-request-id"] = request_id(request)
            return response

    async def _relay(self, request: Request, call: RemoteRequest, adapter: str | None) -> Response:
        with ExitStack() as stack:
            stack.enter_context(self._limit(request))
            relay = Relay(self._replicas, call, adapter, self._counts)
            watcher = watch(request.receive, relay.leave)
            stack.callback(watcher.cancel)
            await relay.begin()
            relay.on_end = stack.pop_all().close
            return relay

    def _limit(self, request: Request) -> AbstractContextManager[None]:
        """Count a key's limits, which hold for the whole fleet. A replica refuses requests without a key."""
        if request.url.path in COUNTED:
            try:
                return self._keyring.identify(credentials(request)).request()
            except ApiError:
                pass
        return nullcontext()

    def _adapter(self, request: Request, body: bytearray) -> str | None:
        if request.method != "POST":
            return None
        try:
            fields = read_object(body)
        except ApiError:  # the replica reports what is wrong
            return None
        return requested_adapter(fields, (*self._options.bases, *self._options.paths), self._changes.aliases)

    async def live(self, request: Request) -> Response:
        return JSONResponse({"status": "live"})

    async def ready(self, request: Request) -> Response:
        if not (await self._replica_states()).get("RUNNING"):
            raise ApiError(503, "engine_unavailable", "No replica is ready", retry_after=1)
        return JSONResponse({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        found = await ask_all(self._replicas, RemoteRequest.of(request, b""))
        if found.refused is not None:
            return _as_response(found.refused)
        states = (await self._replica_states()).items()
        counts = [(f'state="{state.lower()}"', count) for state, count in states]
        lines = _gauge("manylora_fleet_replicas", "Replicas by Ray's name of their state", counts)
        present = [(f'replica="{name}"', int(name in found.reports))
                   for name in sorted({*found.reports, *found.missing})]  # fmt: skip
        help_text = "1: this replica's metrics are here; 0: it has not answered in time"
        lines += _gauge("manylora_fleet_replica_up", help_text, present)
        for name, text in Relay.COUNTERS.items():
            lines += [f"# HELP {name} {text}", f"# TYPE {name} counter", f"{name} {self._counts[name]}"]
        merged = merge_metrics({one.replica: one.body.decode() for one in found.answers})
        return PlainTextResponse(merged + "\n".join(lines) + "\n", media_type=CONTENT_TYPE)

    async def cache(self, request: Request) -> Response:
        # Replicas number their points differently, so request all of them.
        call = RemoteRequest.of(request, b"")
        call = replace(call, scope={**call.scope, "query_string": b""})
        found = await ask_all(self._replicas, call)
        if found.refused is not None:
            return _as_response(found.refused)
        after = query_number(request, "points_after")
        states = await self._replica_states()
        status = fleet_status(found.answers, found.reports, states, time.time(), after)
        status["missing"] = list(found.missing)
        return JSONResponse(status, headers={"Cache-Control": "no-store"})

    async def _replica_states(self) -> dict[str, int]:
        if time.monotonic() - self._states_at > STATES_AGE_S:
            self._states_at = time.monotonic()
            self._states = await asyncio.get_running_loop().run_in_executor(None, _replica_states)
        return self._states


def _replica_states() -> dict[str, int]:
    """States of the replicas in the application with our deployment, whatever its name."""
    for application in serve.status().applications.values():
        if found := application.deployments.get(DEPLOYMENT):
            return {str(getattr(state, "value", state)): n for state, n in found.replica_states.items()}
    return {}


async def _api_error(request: Request, error: Exception) -> Response:
    return failed(request, request.url.path, error)


def _gauge(name: str, help_text: str, samples: Sequence[tuple[str, int]]) -> list[str]:
    """Lines of a Prometheus text. Empty without samples. samples: labels and value."""
    lines = [f"{name}{{{labels}}} {value}" for labels, value in samples]
    return [f"# HELP {name} {help_text}", f"# TYPE {name} gauge", *lines] if lines else []


def _as_response(answer: RemoteResponse) -> Response:
    response = Response(answer.body, answer.status)
    response.raw_headers = answer.headers
    return response
