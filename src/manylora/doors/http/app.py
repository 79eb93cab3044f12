"""The ASGI application: routes, API keys, and errors as JSON."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from manylora.adapters.catalog.entry import AdapterEntry
from manylora.adapters.catalog.names import targets_of
from manylora.adapters.catalog.pinning import Pinning
from manylora.adapters.catalog.shared import SharedAdapters
from manylora.adapters.catalog.uploads import Uploads
from manylora.config.pooling import PoolingSettings
from manylora.doors.http.adapter_routes import ADAPTER_ROUTES, AdapterRoutes
from manylora.doors.http.api.errors import (
    ApiError,
    as_api_error,
    check_name,
    client_left,
    invalid_value,
    renamed,
    unsupported_field,
)
from manylora.doors.http.api.ollama_request import NAMES
from manylora.doors.http.api.parsing import BodyT, parse
from manylora.doors.http.api.schema import DetokenizeRequest, TokenizeRequest
from manylora.doors.http.batches.routes import BATCH_ROUTES, BatchRoutes
from manylora.doors.http.batches.store import BATCH_KEY, BatchStore
from manylora.doors.http.options import ServeOptions
from manylora.doors.http.page import BODIES, CacheStatus, docs_page, document, page_file
from manylora.doors.http.serving import anthropic, ollama, tgi, transport
from manylora.doors.http.serving.backend import Backend
from manylora.doors.http.serving.inference import Inference
from manylora.doors.http.serving.keys import ApiKey, HostCheck, Keyring
from manylora.doors.http.serving.metrics import CONTENT_TYPE, Metrics
from manylora.doors.http.serving.models import adapter_card, base_card, state_of, tiers
from manylora.doors.http.serving.pooled import PooledApi
from manylora.doors.http.serving.responses_api import RecentItems, respond
from manylora.doors.http.serving.tinker import TINKER_ROUTES, TinkerApi
from manylora.doors.http.serving.transport import EventStream, error_response, request_id
from manylora.doors.http.serving.usage import UsageLog
from manylora.doors.triton.metrics import Sample
from manylora.errors import SleepingError
from manylora.system.tracing import Tracer
from manylora.version import __version__

if TYPE_CHECKING:
    from manylora.engine.loop import EngineLoop

logger = logging.getLogger("manylora")

BODIES_AT_ONCE = 16  # bodies of the maximum size that may be received concurrently
OLLAMA, ANTHROPIC = "/api/", "/v1/messages"
VERSION = "anthropic-version"  # a header of all requests of Anthropic's clients


@dataclass(eq=False)
class AppContext:
    """What the routes work with. created: Unix time. shared: set if several servers have one catalog."""

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
    usage: UsageLog | None = None
    tracer: Tracer | None = None


def cors(options: ServeOptions) -> list[Middleware]:
    """Headers for pages of other origins, if any are allowed."""
    if not options.allowed_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origins,
            allow_methods=options.allowed_methods,
            allow_headers=options.allowed_headers,
            allow_credentials=options.allow_credentials,
            expose_headers=["x-request-id"],
        )
    ]


def make_app(start: Callable[[], Awaitable[AppContext]], middleware: Sequence[Middleware] = ()) -> Starlette:
    """start: creates the context, on the event loop that will serve it."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        context = await start()
        options, status = context.options, CacheStatus(context.backend)
        most = options.batch_bytes if context.shared is None else 0  # else its server is not found again
        at_once, max_line = context.backend.queue.capacity, options.max_request_bytes
        batches = BatchStore(app, context.keyring, options.batch_dir, most, at_once, max_line)
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
            await context.pinning.following.close()
            await context.backend.close()
            for one in (context.usage, context.tracer):
                if one is not None:
                    await asyncio.to_thread(one.close)
            await context.backend.catalog.close()
            context.uploads.close()

    routes = [Route(path, _endpoint(name, path), methods=[method]) for method, path, name in ROUTES]
    handlers = {HTTPException: _http_error}
    return Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan, middleware=middleware)  # type: ignore[arg-type]


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
    *(
        ("GET", f"{prefix}/health/{path}", name)
        for prefix in ("", "/v1")
        for path, name in (("live", "live"), ("ready", "ready"), ("model", "probe"))
    ),
    ("POST", "/reset_prefix_cache", "reset_prefix_cache"),
    ("GET", "/metrics", "show_metrics"),
    ("GET", "/ping", "ready"),
    ("GET", "/tokenizer_info", "tokenizer_info"),
    ("GET", "/version", "version"),
    ("GET", "/openapi.json", "describe"),
    ("GET", "/docs", "docs"),
    ("GET", "/v1/cache", "cache"),
    ("GET", "/", "page"),
    ("GET", "/page/{name}", "page"),
    ("POST", "/v1/messages", "messages"),
    ("POST", "/v1/messages/count_tokens", "count_tokens"),
    *(
        ("POST", f"/api/{name}", f"ollama.{name}")
        for name in ("chat", "generate", "embed", "embeddings", "show")
    ),
    ("GET", "/api/tags", "ollama.tags"),
    ("GET", "/api/ps", "ollama.running"),
    ("GET", "/api/version", "ollama.version"),
    ("POST", "/v1/embeddings", "pooled.embeddings"),
    *(("POST", f"/{name}", f"tgi.{name}") for name in ("generate", "generate_stream")),
    ("POST", "/", "tgi.compat"),
    ("GET", "/info", "tgi.info"),
    *(("POST", f"{prefix}/classify", "pooled.classify") for prefix in ("/v1", "")),
    *(("POST", f"{prefix}/score", "pooled.score") for prefix in ("/v1", "")),
    *(("POST", f"{prefix}/rerank", "pooled.rerank") for prefix in ("/v1", "/v2", "")),
    *(("POST", f"{prefix}/pooling", "pooled.pooling") for prefix in ("/v1", "")),
    *BATCH_ROUTES,
    ("POST", "/sleep", "sleep"),  # vLLM's, as the next two
    ("POST", "/wake_up", "wake_up"),
    ("GET", "/is_sleeping", "is_sleeping"),
    *TINKER_ROUTES,
]
"""HTTP method, path, attribute of _Routes: a function of the request, the body if it is in BODIES, and the
API key unless it is in NO_KEY. Those of AdapterRoutes take the request alone: they read the body after a look
at the key.
"""
NO_KEY = ("live", "ready", "version", "describe", "docs", "page", "ollama.version", "show_metrics")
POLLED = "clients ask until a batch or a sample has ended"
LISTS = "lists what is in memory; clients and pages ask before each of their requests"
FREE = {
    "live": "load balancers ask, without a key",
    "ready": "load balancers ask, without a key",
    "probe": "its answers are shared, so that many requests cost as much as one",
    "show_metrics": "monitoring asks all the time",
    "cache": "the page asks all the time",
    **dict.fromkeys(("models", "model", "ollama.tags", "ollama.running", "tgi.info"), LISTS),
    **dict.fromkeys(("batches.file", "batches.files", "batches.batch", "batches.list"), POLLED),
    **dict.fromkeys(("tinker.retrieve_future", "tinker.other"), POLLED),
    "tinker.asample": "counts until its sample has ended, which is after its answer",
    **dict.fromkeys(("version", "describe", "docs", "page", "ollama.version"), "needs no key"),
}
"""Methods of _Routes that do not count towards a key's limits, and why. All others do."""
COUNTED = frozenset(path for _, path, name in ROUTES if name not in FREE)
UNCHECKED = ("live", "ready")  # load balancers' probes may use any host name


class _Routes:
    def __init__(self, context: AppContext, status: CacheStatus, batches: BatchStore) -> None:
        self.context, self._status = context, status
        self._inference = inference = context.inference
        self._catalog = context.backend.catalog
        self.completions, self.chat = inference.complete, inference.chat
        self.responses = partial(respond, inference, RecentItems())
        self.messages = partial(anthropic.answer_messages, inference)
        self.count_tokens = partial(anthropic.count_tokens, inference)
        self.pooled = PooledApi(inference, context.pooling)
        self.ollama = ollama.OllamaApi(inference, self.pooled, context.created, context.options.folder)
        self.tgi = tgi.TgiApi(inference, context.options.max_queue_size)
        self.tinker = TinkerApi(inference, context.shared is None)
        self.adapters = AdapterRoutes(
            self._body,
            context.keyring,
            self._catalog,
            context.uploads,
            context.pinning,
            context.options.drain_seconds,
            context.shared,
        )
        self.batches = BatchRoutes(batches)
        self._body_memory = transport.BodyMemory(BODIES_AT_ONCE * context.options.max_request_bytes)
        self._parsing = asyncio.Lock()
        context.backend.on_disconnect = context.metrics.count_disconnect

    async def answer(self, name: str, path: str, request: Request) -> Response:
        """What the route with this name answers. Raises any exception."""
        handle: Callable[..., Awaitable[Response]] = attrgetter(name)(self)
        if name in NO_KEY or name.startswith("adapters."):
            return await handle(request)
        key = self.key(request)
        if name not in BODIES:
            return await handle(request, key)
        body = await self._body(request, BODIES[name], any_type=path.startswith(OLLAMA))
        return await handle(request, body, key)

    async def models(self, request: Request, key: ApiKey) -> Response:
        tier_of = tiers(self.context.backend.stats())
        cards = [self._base_card(name) for name in self._inference.bases if key.may_see(None)]
        for entry in self._catalog.entries():
            owner = self._catalog.owner_of(entry.name)
            if key.may_see(entry.name, owner) and (entry.version is not None or entry.problem is None):
                cards.append(self._adapter_card(entry, tier_of))
        known = {card["id"]: card for card in cards} | {
            name: self._base_card(name) for name in self._inference.bases
        }
        for alias in sorted(self._catalog.aliases):
            card = known.get(self._catalog.aliases.resolve(alias))
            if card is not None and self._inference.may_use(alias, key):
                cards.append({**card, **self._alias_fields(alias)})
        if VERSION in request.headers:
            return JSONResponse(anthropic.model_list(cards))
        return JSONResponse({"object": "list", "data": cards})

    async def model(self, request: Request, key: ApiKey) -> Response:
        given = request.path_params["name"]
        name = self._catalog.aliases.resolve(given)
        if name in self._inference.bases:
            key.check(None)
            card = self._base_card(name)
        else:
            self._inference.check_use(check_name(given, "model"), key)
            await self._catalog.version(name)
            card = self._adapter_card(self._catalog.entry(name), tiers(self.context.backend.stats()))
        card |= self._alias_fields(given)
        return JSONResponse(anthropic.model_info(card) if VERSION in request.headers else card)

    def _alias_fields(self, name: str) -> dict[str, Any]:
        """What a name that may be an alias has in place of what it stands for."""
        aliases = self._catalog.aliases
        targets = targets_of(aliases[name]) if name in aliases else []
        shown = [{"id": one, "weight": weight} for one, weight in targets]
        return {"id": name} | ({"targets": shown} if len(shown) > 1 else {})

    async def tokenize(self, request: Request, body: TokenizeRequest, key: ApiKey) -> Response:
        ids = await (await self._inference.prompts_of(body.model, key)).tokenize(body)
        most = self._inference.limits.max_seq_len
        return JSONResponse({"count": len(ids), "max_model_len": most, "tokens": ids})

    async def detokenize(self, request: Request, body: DetokenizeRequest, key: ApiKey) -> Response:
        prompts = await self._inference.prompts_of(body.model, key)
        return JSONResponse({"prompt": await prompts.detokenize(body)})

    async def live(self, request: Request) -> Response:
        return JSONResponse({"status": "live"})

    async def ready(self, request: Request) -> Response:
        if not self.context.backend.engine.alive:
            raise ApiError(503, "engine_dead", "The engine has stopped")
        loop = self.context.backend.engine.loop
        if loop is not None and loop.is_sleeping:
            raise as_api_error(SleepingError())
        return JSONResponse({"status": "ready"})

    async def probe(self, request: Request, key: ApiKey) -> Response:
        await self._inference.probe()
        return JSONResponse({"status": "healthy"})

    async def show_metrics(self, request: Request) -> Response:
        if not self.context.options.open_metrics and not self._inference.sees_all(self.key(request)):
            raise ApiError(403, "not_allowed", "Metrics name every adapter: this API key may not see them")
        more = [Sample("manylora_pinned_adapters", (), len(self.context.pinning))]
        for state, number in Counter(map(state_of, self._catalog.entries())).items():
            more.append(Sample("manylora_catalog_adapters", (("state", state),), number))
        for code, number in self._catalog.num_failures.items():
            more.append(Sample("manylora_adapter_read_failures_total", (("code", code),), number))
        for (alias, model), number in self._inference.shared_names.items():
            labels = ("alias", alias), ("model", model)
            more.append(Sample("manylora_alias_requests_total", labels, number))
        if self.context.usage is not None:
            dropped = self.context.usage.num_dropped
            more.append(Sample("manylora_usage_log_dropped_total", (), dropped))
        text = self.context.metrics.render(self.context.backend.stats(), more)
        return PlainTextResponse(text, media_type=CONTENT_TYPE)

    async def reset_prefix_cache(self, request: Request, key: ApiKey) -> Response:
        """?lora_name=: of one adapter."""
        name = request.query_params.get("lora_name")
        self.context.keyring.check_operator(key)
        if name is not None:
            self._inference.check_use(check_name(name, "lora_name"), key, field="lora_name")
            for one in self._catalog.aliases.targets(name):
                digest = None  # blocks of the base model alone are not told apart
                if one not in self._inference.bases:
                    digest = (await self._catalog.version(self._catalog.entry(one).name)).digest
                self.context.backend.engine.reset_prefix_cache(digest)
        else:
            self.context.backend.engine.reset_prefix_cache(None)
        return Response()

    async def sleep(self, request: Request, key: ApiKey) -> Response:
        """Answers once the open requests have ended and memory is free."""
        loop, query = self._sleeper(request, key), request.query_params
        level = query.get("level", "1")
        if level not in ("1", "2"):
            raise invalid_value("level must be 1 or 2", "level")
        if query.get("mode", "wait") != "wait":
            raise unsupported_field("mode must be wait: open requests are finished first", "mode")
        await asyncio.wrap_future(loop.sleep(int(level)))
        return Response()

    async def wake_up(self, request: Request, key: ApiKey) -> Response:
        loop = self._sleeper(request, key)
        await asyncio.wrap_future(loop.wake_up(request.query_params.getlist("tags") or None))
        return Response()

    async def is_sleeping(self, request: Request, key: ApiKey) -> Response:
        return JSONResponse({"is_sleeping": self._sleeper(request).is_sleeping})

    def _sleeper(self, request: Request, key: ApiKey | None = None) -> EngineLoop:
        """key: that changes something."""
        if not self.context.options.enable_sleep_mode:
            raise ApiError(404, "not_found", f"{request.url.path} needs --enable-sleep-mode")
        if key is not None:
            self.context.keyring.check_operator(key)
        loop = self.context.backend.engine.loop
        assert loop is not None  # enable_sleep_mode is refused with triton_url
        return loop

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def tokenizer_info(self, request: Request, key: ApiKey) -> Response:
        prompts = await self._inference.prompts_of(request.query_params.get("model", ""), key)
        return JSONResponse(prompts.tokenizer_info())

    async def docs(self, request: Request) -> Response:
        return docs_page(document(ROUTES))

    async def describe(self, request: Request) -> Response:
        return JSONResponse(document(ROUTES))

    async def page(self, request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        return page_file(name, request.headers.get("if-none-match", ""))

    async def cache(self, request: Request, key: ApiKey) -> Response:
        given = {name: transport.query_number(request, name) for name in ("changes_after", "points_after")}
        status = await self._status.snapshot(key, **given)
        return JSONResponse(status, headers={"Cache-Control": "no-store"})

    def key(self, request: Request) -> ApiKey:
        of_batch: ApiKey | None = request.scope.get(BATCH_KEY)
        return of_batch or self.context.keyring.identify(transport.credentials(request))

    async def _body(self, request: Request, kind: type[BodyT], *, any_type: bool = False) -> BodyT:
        """any_type: accept any Content-Type."""
        with self._body_memory.reserve() as grow:
            most = self.context.options.max_request_bytes
            raw = await transport.read_body(request, most, grow, any_type=any_type)
            if len(raw) <= transport.SMALL:
                return parse(raw, kind)
            async with self._parsing:  # other requests are served between two large bodies
                started = time.monotonic()
                try:
                    return parse(raw, kind)
                finally:
                    await asyncio.sleep(time.monotonic() - started)

    def _base_card(self, name: str) -> dict[str, Any]:
        found = self._inference
        return base_card(name, found.bases[0], self.context.created, found.limits.max_seq_len, found.defaults)

    def _adapter_card(self, entry: AdapterEntry, tier_of: dict[str, str]) -> dict[str, Any]:
        tier, pinned = tier_of.get(entry.name, "disk"), self.context.pinning.is_pinned(entry.name)
        base, defaults = self._inference.bases[0], self._inference.defaults
        return adapter_card(entry, base, self.context.created, tier, defaults, pinned=pinned)


def _endpoint(name: str, path: str) -> Callable[[Request], Awaitable[Response]]:
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
                response = await routes.answer(name, path, request)
            except Exception as error:
                response = failed(request, path, error)
            if isinstance(response, EventStream):
                response.on_close.append(stack.pop_all().close)
        routes.context.metrics.count_response(path, response.status_code)
        seconds, number = time.monotonic() - started, request_id(request)
        response.headers["x-request-id"] = number
        if VERSION in request.headers:
            response.headers["request-id"] = number
        logger.debug("%s %d in %.3f s, request %s", path, response.status_code, seconds, number)
        return response

    handle.__name__ = name
    return handle


def failed(request: Request, path: str, error: Exception) -> Response:
    """The response to a request whose handler raised this error. Unexpected ones are logged."""
    if isinstance(error, ClientDisconnect):  # it left while sending the body: nobody reads this response
        return _error_at(request, path, client_left())
    found = as_api_error(error)
    if found.code == "internal_error":
        logger.error("%s failed, request %s", path, request_id(request), exc_info=error)
    return _error_at(request, path, found)


def _error_at(request: Request, path: str, error: ApiError) -> Response:
    """An error in the format of the API that the path belongs to."""
    if path.startswith(ANTHROPIC) or VERSION in request.headers:
        body = anthropic.error_body(error) | {"request_id": request_id(request)}
        return JSONResponse(body, error.status, headers=error.headers)
    if path in tgi.PATHS or (path == "/" and request.method == "POST"):
        return tgi.error_response(error)
    if not path.startswith(OLLAMA):
        return error_response(error)
    error = renamed(error, NAMES)
    if error.code == "not_found":
        served = ", ".join(path for _, path, name in ROUTES if name.startswith("ollama"))
        error = ApiError(404, error.code, f"{path[:100]} is not served: there are {served}")
    return JSONResponse({"error": error.message}, error.status, headers=error.headers)


async def _http_error(request: Request, error: HTTPException) -> Response:
    """For a path or method that does not exist: what to ask instead."""
    status, method, path = HTTPStatus(error.status_code), request.method, request.url.path
    reason = status.phrase
    if status == HTTPStatus.NOT_FOUND:
        served = {route for verb, route, _ in ROUTES if verb == method}
        like = next(
            (p for p in (path.rstrip("/"), f"/v1{path}", path.removeprefix("/v1")) if p in served), None
        )
        hint = "/openapi.json lists those of this server"
        if like is not None:
            hint = f"did you mean {like}?"
        elif path.startswith("/v2"):
            hint = "it belongs to Triton, which manylora triton starts; this is manylora serve"
        reason = f"{method} {path[:200]}: there is no such path: {hint}"
    elif status == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = (error.headers or {}).get("Allow", "another method")
        reason = f"{method} {path[:200]}: this path takes {allowed}"
    response = _error_at(request, path, ApiError(error.status_code, status.name.lower(), reason))
    response.headers["x-request-id"] = request_id(request)
    return response
