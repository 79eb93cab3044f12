"""The front of a fleet: an ASGI application that has every request answered by one of the replicas."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from manylora.fleet.calls import Answer, Call
from manylora.fleet.joined import fleet_status, joined_metrics
from manylora.fleet.options import FleetOptions
from manylora.fleet.relay import Relay
from manylora.lora.library.aliases import Aliases
from manylora.openai.api.errors import ApiError, as_api_error
from manylora.openai.api.schema import read_object
from manylora.openai.other_routes import error_at
from manylora.openai.serving.keys import Keyring
from manylora.openai.serving.metrics import CONTENT_TYPE
from manylora.openai.serving.transport import BodyMemory, read_body, request_id, watch

logger = logging.getLogger("manylora")

APPLICATION, DEPLOYMENT = "manylora", "Replicas"
ALL_S = 10.0  # for all replicas to answer
STATES_AGE_S = 1.0
LONGEST_NUMBER = 18  # digits
BODIES_AT_ONCE = 16
LATEST = ":latest"  # which Ollama's clients add to a name
# Requests that a key's limits count.
GENERATE = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/api/chat", "/api/generate", "/v1/run",
    "/guidance",
)  # fmt: skip
LIVE = ("/health", "/health/live", "/v1/health/live")
READY = ("/health/ready", "/v1/health/ready", "/ping")
LOADS = tuple(f"{start}/{verb}_lora_adapter" for start in ("", "/v1") for verb in ("load", "unload", "pin"))


def make_front(options: FleetOptions, replicas: DeploymentHandle) -> Starlette:
    front = _Front(options, replicas)
    routes = [
        *(Route(path, front.live) for path in LIVE),
        *(Route(path, front.ready) for path in READY),
        *(Route(path, front.load, methods=["POST"]) for path in LOADS),
        Route("/v1/lora_adapters/{name:path}", front.load, methods=["PUT"]),
        Route("/metrics", front.metrics),
        Route("/v1/cache", front.cache),
        Route("/{path:path}", front.forward, methods=["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"]),
    ]
    return Starlette(routes=routes, exception_handlers={ApiError: _api_error})


class _Front:
    def __init__(self, options: FleetOptions, replicas: DeploymentHandle) -> None:
        self._options, self._replicas = options, replicas
        self._keyring = Keyring(options.api_keys, plain=options.api_key)
        self._body_memory = BodyMemory(BODIES_AT_ONCE * options.max_request_bytes)
        self._counts: Counter[str] = Counter()
        self._states: dict[str, int] = {}
        self._states_at = float("-inf")

    async def forward(self, request: Request) -> Response:
        path = request.url.path
        try:
            with self._body_memory.reserve() as grow:
                most = self._options.max_request_bytes
                body = await read_body(request, most, grow, any_type=True)
            return await self._relay(request, Call.of(request, body), self._adapter(request, body))
        except ClientDisconnect:
            return error_at(path, ApiError(499, "client_left", "The client has closed the connection"))
        except Exception as error:
            found = as_api_error(error)
            if found.code == "internal_error":
                logger.exception("%s failed, request %s", path, request_id(request))
            response = error_at(path, found)
            response.headers["x-request-id"] = request_id(request)
            return response

    async def _relay(self, request: Request, call: Call, adapter: str | None) -> Response:
        with ExitStack() as stack:
            stack.enter_context(self._limit(request))
            relay = Relay(self._replicas, call, adapter, self._counts)
            watcher = watch(request.receive, relay.leave)
            stack.callback(watcher.cancel)
            await relay.begin()
            relay.on_end = stack.pop_all().close
            return relay

    def _limit(self, request: Request) -> AbstractContextManager[None]:
        """A key's limits hold for the fleet, so they are counted here; a replica refuses what has no key."""
        if request.url.path in GENERATE:
            try:
                return self._keyring.identify(request.headers.get("authorization", "")).request()
            except ApiError:
                pass
        return nullcontext()

    def _adapter(self, request: Request, body: bytearray) -> str | None:
        """The adapter that the request asks for, if its fields agree. A wrong guess costs a cold load."""
        if request.method != "POST":
            return None
        try:
            fields = read_object(body)
        except ApiError:  # the replica says what is wrong
            return None
        lora = fields.get("lora_request")
        named = [fields.get(name) for name in ("lora_model", "adapter_id", "lora_path")]
        named.append(lora.get("lora_name") if isinstance(lora, dict) else None)
        name = _adapter_name([*named, fields.get("model")], self._options.bases)
        meant = None if name is None else Aliases(dict(self._options.lora_alias)).resolve(name)
        return None if meant in self._options.bases else meant

    async def load(self, request: Request) -> Response:
        text = "In a fleet adapters come and go in the folders of --lora-root, which every replica watches"
        raise ApiError(403, "not_allowed", text)

    async def live(self, request: Request) -> Response:
        return JSONResponse({"status": "live"})

    async def ready(self, request: Request) -> Response:
        if not (await self._replica_states()).get("RUNNING"):
            raise ApiError(503, "engine_unavailable", "No replica is ready", retry_after=1)
        return JSONResponse({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        answers, _ = await self._all(request)
        refused = next((one for one in answers if one.status != 200), None)
        if refused is not None:
            return _as_response(refused)
        lines = []
        for state, count in (await self._replica_states()).items():
            lines.append(f'manylora_fleet_replicas{{state="{state.lower()}"}} {count}')
        if lines:
            help_text = "# HELP manylora_fleet_replicas Replicas by Ray's name of their state"
            lines = [help_text, "# TYPE manylora_fleet_replicas gauge", *lines]
        for name, text in Relay.COUNTERS.items():
            lines += [f"# HELP {name} {text}", f"# TYPE {name} counter", f"{name} {self._counts[name]}"]
        joined = joined_metrics({one.replica: one.body.decode() for one in answers})
        return PlainTextResponse(joined + "\n".join(lines) + "\n", media_type=CONTENT_TYPE)

    async def cache(self, request: Request) -> Response:
        # A replica numbers its points in its own way, so it is asked for all of them.
        answers, reports = await self._all(request, with_query=False)
        refused = next((one for one in answers if one.status != 200), None)
        if refused is not None:
            return _as_response(refused)
        after = request.query_params.get("points_after", "0")
        if not after.isdecimal() or len(after) > LONGEST_NUMBER:
            raise ApiError(400, "invalid_value", "points_after must be the number of a point")
        states = await self._replica_states()
        status = fleet_status(answers, reports, states, time.time(), int(after))
        return JSONResponse(status, headers={"Cache-Control": "no-store"})

    async def _all(
        self, request: Request, with_query: bool = True
    ) -> tuple[list[Answer], dict[str, dict[str, Any]]]:
        """The answers of all replicas that give one in time, and their reports by replica."""
        call = Call.of(request, b"")
        call = call if with_query else replace(call, scope={**call.scope, "query_string": b""})
        response = self._replicas.broadcast("whole_answer", call)
        try:
            found = await response.results_async(timeout_s=ALL_S, return_exceptions=True)
        except TimeoutError as error:
            text = f"A replica has not answered for {ALL_S:.0f} s"
            raise ApiError(503, "engine_unavailable", text, retry_after=1) from error
        given = [one for one in found if not isinstance(one, BaseException)]
        return [one for one, _ in given], {one.replica: report for one, report in given}

    async def _replica_states(self) -> dict[str, int]:
        if time.monotonic() - self._states_at > STATES_AGE_S:
            self._states_at = time.monotonic()
            self._states = await asyncio.get_running_loop().run_in_executor(None, _replica_states)
        return self._states


def _replica_states() -> dict[str, int]:
    """Of the application that has our deployment, whatever its name."""
    for application in serve.status().applications.values():
        if found := application.deployments.get(DEPLOYMENT):
            return {str(getattr(state, "value", state)): n for state, n in found.replica_states.items()}
    return {}


async def _api_error(request: Request, error: Exception) -> Response:
    return error_at(request.url.path, as_api_error(error))


def _adapter_name(named: Sequence[Any], bases: Sequence[str]) -> str | None:
    for one in named:
        if not isinstance(one, str) or not one:
            continue
        name = one.removesuffix(LATEST)
        base = next((base for base in bases if name == base or name.startswith(base + ":")), None)
        return name if base is None else name[len(base) + 1 :] or None
    return None


def _as_response(answer: Answer) -> Response:
    response = Response(answer.body, answer.status)
    response.raw_headers = answer.headers
    return response
