"""The ASGI application: routes, API keys, and errors as JSON."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from operator import attrgetter

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from manylora.config.pooling import PoolingSettings
from manylora.lora.catalog.entry import AdapterEntry
from manylora.lora.catalog.pinning import Pinning
from manylora.lora.catalog.shared import SharedAdapters
from manylora.lora.catalog.uploads import Uploads
from manylora.openai.adapter_routes import ADAPTER_ROUTES, AdapterRoutes
from manylora.openai.api import schema
from manylora.openai.api.errors import ApiError, check_name
from manylora.openai.api.openapi import document
from manylora.openai.api.parsing import BodyT, parse
from manylora.openai.api.responses_request import ResponsesRequest
from manylora.openai.batches.routes import BATCH_ROUTES, BatchRoutes
from manylora.openai.batches.store import BATCH_KEY, BatchStore
from manylora.openai.options import ServeOptions
from manylora.openai.other_routes import OTHER_ROUTES, OtherRoutes, error_at, failed
from manylora.openai.page.cache_status import CacheStatus
from manylora.openai.page.page import docs_page, page_file
from manylora.openai.serving.backend import Backend
from manylora.openai.serving.host_check import HostCheck
from manylora.openai.serving.inference import Inference
from manylora.openai.serving.keys import ApiKey, Keyring
from manylora.openai.serving.metrics import CONTENT_TYPE, Metrics
from manylora.openai.serving.models import adapter_card, base_card, state_of, tiers
from manylora.openai.serving.responses_api import RecentItems, respond
from manylora.openai.serving.transport import (
    SMALL,
    BodyMemory,
    EventStream,
    credentials,
    error_response,
    query_number,
    read_body,
    request_id,
)
from manylora.version import __version__

logger = logging.getLogger("manylora")

BODIES_AT_ONCE = 16  # bodies of the maximum size that may be received concurrently
Handler = Callable[[Request], Awaitable[Response]]


@dataclass(eq=False)
class AppContext:
    """What the routes work with. uploads: adapters sent as request bodies. created: Unix time. shared: set if
    several servers have one catalog.
    """

    backend: Backend
    inference: Inference
    keyring: Keyring
    hosts: HostCheck
    metrics: Metrics
    uploads: Uploads
    pinning: Pinning
    options: ServeOptions
    created: int
    pooling: PoolingSettings
    shared: SharedAdapters | None = None


def make_app(start: Callable[[], Awaitable[AppContext]]) -> Starlette:
    """start: creates the context, on the event loop that will serve it."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        context = await start()
        status = CacheStatus(context.backend)
        batches = _open_batches(app, context)
        app.state.routes = _Routes(context, status, batches)
        try:
            if context.shared is not None:
                await context.shared.start()
            yield
        finally:
            if context.shared is not None:
                await context.shared.close()
            status.close()
            await batches.close()
            await context.pinning.close()
            await context.backend.close()
            await context.backend.catalog.close()
            context.uploads.close()

    routes = [Route(path, _endpoint(name, path), methods=[method]) for method, path, name in ROUTES]
    handlers = {HTTPException: _http_error, Exception: _unexpected}
    return Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)  # type: ignore[arg-type]


ROUTES = [
    ("POST", "/v1/completions", "completions"),
    ("POST", "/v1/chat/completions", "chat"),
    ("POST", "/v1/responses", "responses"),
    ("GET", "/v1/models", "models"),
    ("GET", "/v1/models/{name:path}", "model"),
    *ADAPTER_ROUTES,
    ("POST", "/tokenize", "tokenize"),
    ("POST", "/detokenize", "detokenize"),
    ("GET", "/health", "live"),
    ("GET", "/health/live", "live"),
    ("GET", "/health/ready", "ready"),
    ("GET", "/health/model", "probe"),
    ("GET", "/v1/health/live", "live"),
    ("GET", "/v1/health/ready", "ready"),
    ("GET", "/v1/health/model", "probe"),
    ("GET", "/metrics", "show_metrics"),
    ("GET", "/ping", "ready"),
    ("GET", "/tokenizer_info", "tokenizer_info"),
    ("GET", "/version", "version"),
    ("GET", "/openapi.json", "describe"),
    ("GET", "/docs", "docs"),
    ("GET", "/v1/cache", "cache"),
    ("GET", "/", "page"),
    ("GET", "/page/{name}", "page"),
    *OTHER_ROUTES,
    *BATCH_ROUTES,
]
"""HTTP method, path, method of _Routes."""
POLLED = "clients ask until a batch has ended"
LISTS = "lists what is in memory; clients and pages ask before each of their requests"
FREE = {
    "live": "load balancers ask, without a key",
    "ready": "load balancers ask, without a key",
    "probe": "its answers are shared, so that many requests cost as much as one",
    "show_metrics": "monitoring asks all the time",
    "cache": "the page asks all the time",
    **dict.fromkeys(("models", "model", "other.ollama_tags", "other.ollama_running"), LISTS),
    **dict.fromkeys(("batches.file", "batches.files", "batches.batch", "batches.list"), POLLED),
    **dict.fromkeys(("version", "describe", "docs", "page", "other.ollama_version"), "needs no key"),
}
"""Methods of _Routes that do not count towards a key's limits, and why. All others do."""
COUNTED = frozenset(path for _, path, name in ROUTES if name not in FREE)
UNCHECKED = ("live", "ready")  # load balancers' probes may use any host name


class _Routes:
    def __init__(self, context: AppContext, status: CacheStatus, batches: BatchStore) -> None:
        self.context, self._status = context, status
        self._inference = context.inference
        self._catalog = context.backend.catalog
        shown = context.created, context.pooling, context.options.folder
        self.other = OtherRoutes(self.key, self._body, context.inference, *shown)
        self.adapters = AdapterRoutes(
            self._body,
            context.keyring,
            self._catalog,
            context.uploads,
            context.pinning,
            context.options.drain_seconds,
            context.shared,
        )
        self.batches = BatchRoutes(self.key, self._body, batches)
        self._recent_items = RecentItems()
        self._body_memory = BodyMemory(BODIES_AT_ONCE * context.options.max_request_bytes)
        self._parsing = asyncio.Lock()
        context.inference.on_disconnect = context.metrics.count_disconnect

    async def completions(self, request: Request) -> Response:
        key = self.key(request)
        body = await self._body(request, schema.CompletionRequest)
        return await self._inference.complete(request, body, key)

    async def chat(self, request: Request) -> Response:
        key = self.key(request)
        body = await self._body(request, schema.ChatRequest)
        return await self._inference.chat(request, body, key)

    async def responses(self, request: Request) -> Response:
        key = self.key(request)
        body = await self._body(request, ResponsesRequest)
        return await respond(self._inference, self._recent_items, request, body, key)

    async def models(self, request: Request) -> Response:
        key = self.key(request)
        tier_of = tiers(self.context.backend.stats())
        cards = [self._base_card(name) for name in self._inference.bases if key.may_see(None)]
        for entry in self._catalog.entries():
            owner = self._catalog.owner_of(entry.name)
            if key.may_see(entry.name, owner) and (entry.version is not None or entry.problem is None):
                cards.append(self._adapter_card(entry, tier_of))
        known = {card["id"]: card for card in cards} | {
            name: self._base_card(name) for name in self._inference.bases
        }
        for alias, name in self._catalog.aliases.resolved():
            if name in known and self._inference.may_use(alias, key):
                cards.append({**known[name], "id": alias})
        return JSONResponse({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        key, given = self.key(request), request.path_params["name"]
        name = self._catalog.aliases.resolve(given)
        if name in self._inference.bases:
            key.check(None)
            return JSONResponse({**self._base_card(name), "id": given})
        self._inference.check_use(check_name(given, "model"), key)
        await self._catalog.version(name)
        card = self._adapter_card(self._catalog.entry(name), tiers(self.context.backend.stats()))
        return JSONResponse({**card, "id": given})

    async def tokenize(self, request: Request) -> Response:
        key = self.key(request)
        body = await self._body(request, schema.TokenizeRequest)
        ids = await (await self._inference.prompts_of(body.model, key)).tokenize(body)
        most = self._inference.limits.max_seq_len
        return JSONResponse({"count": len(ids), "max_model_len": most, "tokens": ids})

    async def detokenize(self, request: Request) -> Response:
        key = self.key(request)
        body = await self._body(request, schema.DetokenizeRequest)
        prompts = await self._inference.prompts_of(body.model, key)
        return JSONResponse({"prompt": await prompts.detokenize(body)})

    async def live(self, request: Request) -> Response:
        return JSONResponse({"status": "live"})

    async def ready(self, request: Request) -> Response:
        if not self.context.backend.alive:
            raise ApiError(503, "engine_dead", "The engine has stopped")
        return JSONResponse({"status": "ready"})

    async def probe(self, request: Request) -> Response:
        self.key(request)
        await self._inference.probe()
        return JSONResponse({"status": "healthy"})

    async def show_metrics(self, request: Request) -> Response:
        if not self.context.options.open_metrics and not self._inference.sees_all(self.key(request)):
            raise ApiError(403, "not_allowed", "Metrics name every adapter: this API key may not see them")
        states = Counter(state_of(entry) for entry in self._catalog.entries())
        stats, failures = self.context.backend.stats(), self._catalog.num_failures
        return PlainTextResponse(
            self.context.metrics.render(stats, states, failures, len(self.context.pinning)),
            media_type=CONTENT_TYPE,
        )

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def tokenizer_info(self, request: Request) -> Response:
        key, name = self.key(request), request.query_params.get("model", "")
        return JSONResponse((await self._inference.prompts_of(name, key)).tokenizer_info())

    async def docs(self, request: Request) -> Response:
        return docs_page(document(ROUTES))

    async def describe(self, request: Request) -> Response:
        return JSONResponse(document(ROUTES))

    async def page(self, request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        return page_file(name, request.headers.get("if-none-match", ""))

    async def cache(self, request: Request) -> Response:
        key = self.key(request)
        given = {name: query_number(request, name) for name in ("changes_after", "points_after")}
        status = await self._status.snapshot(key, **given)
        return JSONResponse(status, headers={"Cache-Control": "no-store"})

    def key(self, request: Request) -> ApiKey:
        of_batch: ApiKey | None = request.scope.get(BATCH_KEY)
        return of_batch or self.context.keyring.identify(credentials(request))

    async def _body(self, request: Request, kind: type[BodyT], *, any_type: bool = False) -> BodyT:
        """any_type: accept any Content-Type."""
        with self._body_memory.reserve() as grow:
            most = self.context.options.max_request_bytes
            raw = await read_body(request, most, grow, any_type=any_type)
            if len(raw) <= SMALL:
                return parse(raw, kind)
            async with self._parsing:  # other requests are served between two large bodies
                started = time.monotonic()
                try:
                    return parse(raw, kind)
                finally:
                    await asyncio.sleep(time.monotonic() - started)

    def _base_card(self, name: str) -> dict[str, object]:
        bases, limits = self._inference.bases, self._inference.limits
        defaults = self._inference.defaults
        return base_card(name, bases[0], self.context.created, limits.max_seq_len, defaults)

    def _adapter_card(self, entry: AdapterEntry, tier_of: dict[str, str]) -> dict[str, object]:
        tier = tier_of.get(entry.name, "disk")
        pinned = self.context.pinning.is_pinned(entry.name)
        base, defaults = self._inference.bases[0], self._inference.defaults
        return adapter_card(entry, base, self.context.created, tier, defaults, pinned=pinned)


def _endpoint(name: str, path: str) -> Handler:
    """The handler of one route. Every exception becomes an error object, and every response is counted."""

    async def handle(request: Request) -> Response:
        routes: _Routes = request.app.state.routes
        started = time.monotonic()
        with ExitStack() as stack:
            try:
                if name not in UNCHECKED and BATCH_KEY not in request.scope:
                    routes.context.hosts.check(request)
                if name not in FREE and BATCH_KEY not in request.scope:
                    stack.enter_context(routes.key(request).request())
                response: Response = await attrgetter(name)(routes)(request)
            except Exception as error:
                response = failed(request, path, error)
            if isinstance(response, EventStream):
                response.on_close.append(stack.pop_all().close)
        routes.context.metrics.count_response(path, response.status_code)
        seconds, number = time.monotonic() - started, request_id(request)
        response.headers["x-request-id"] = number
        logger.debug("%s %d in %.3f s, request %s", path, response.status_code, seconds, number)
        return response

    handle.__name__ = name
    return handle


def _open_batches(app: Starlette, context: AppContext) -> BatchStore:
    options = context.options
    most = options.batch_bytes if context.shared is None else 0  # a batch's server would not be found again
    folder, at_once = options.batch_dir, context.backend.queue.capacity
    return BatchStore(app, context.keyring, folder, most, at_once, options.max_request_bytes)


async def _http_error(request: Request, error: HTTPException) -> Response:
    code = HTTPStatus(error.status_code).name.lower()
    asked, reason = f"{request.method} {request.url.path[:200]}", HTTPStatus(error.status_code).phrase
    if error.status_code == HTTPStatus.NOT_FOUND:
        reason = f"{asked}: there is no such path: {_path_meant(request.method, request.url.path)}"
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        reason = f"{asked}: this path takes {(error.headers or {}).get('Allow', 'another method')}"
    found = ApiError(error.status_code, code, reason)
    response = error_at(request, request.url.path, found)
    response.headers["x-request-id"] = request_id(request)
    return response


def _path_meant(method: str, path: str) -> str:
    """What to ask instead of a path that does not exist."""
    served = {route for verb, route, _ in ROUTES if verb == method}
    for meant in (path.rstrip("/"), f"/v1{path}", path.removeprefix("/v1")):
        if meant in served:
            return f"did you mean {meant}?"
    if path.startswith("/v2"):
        return "it belongs to Triton, which manylora triton starts; this is manylora serve"
    if path.startswith("/generate"):
        return "ask /v1/completions or /v1/chat/completions"
    return "/openapi.json lists those of this server"


async def _unexpected(request: Request, error: Exception) -> Response:
    return error_response(ApiError(500, "internal_error", "The server failed to answer this request"))
