"""The status page's files and what it polls (CacheStatus), and the OpenAPI document, also as a page."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from manylora.doors.http.api import ollama_request, schema
from manylora.doors.http.api.errors import ApiError
from manylora.doors.http.api.schema import Body
from manylora.doors.http.api.tgi_request import TgiRequest
from manylora.doors.http.serving import anthropic, pooled, tinker
from manylora.doors.http.serving.backend import Backend
from manylora.doors.http.serving.keys import ApiKey
from manylora.doors.http.serving.metrics import POINT_S
from manylora.doors.http.serving.responses_api import ResponsesRequest
from manylora.stats import CacheChange, CacheMap, MappedAdapter
from manylora.version import __version__

logger = logging.getLogger("manylora")

BODIES: dict[str, type[Body]] = {
    "completions": schema.CompletionRequest,
    "chat": schema.ChatRequest,
    "responses": ResponsesRequest,
    "messages": anthropic.MessagesRequest,
    "count_tokens": anthropic.CountTokensRequest,
    "ollama.chat": ollama_request.OllamaChat,
    "ollama.generate": ollama_request.OllamaGenerate,
    "ollama.embed": ollama_request.OllamaEmbed,
    "ollama.embeddings": ollama_request.OllamaEmbeddings,
    "ollama.show": ollama_request.OllamaShow,
    "adapters.load": schema.LoadRequest,
    "adapters.unload": schema.UnloadRequest,
    "adapters.pin": schema.PinRequest,
    "tgi.generate": TgiRequest,
    "tgi.generate_stream": TgiRequest,
    "tgi.compat": TgiRequest,
    "tinker.asample": tinker.SampleRequest,
    "tinker.retrieve_future": tinker.Promise,
    "tinker.create_sampling_session": tinker.SamplingSession,
    "pooled.embeddings": pooled.EmbeddingRequest,
    "pooled.classify": pooled.ClassifyRequest,
    "pooled.score": pooled.ScoreRequest,
    "pooled.rerank": pooled.RerankRequest,
    "pooled.pooling": pooled.PoolingRequest,
    "batches.create": schema.BatchRequest,
    "tokenize": schema.TokenizeRequest,
    "detokenize": schema.DetokenizeRequest,
}
"""Method of the routes -> what it takes."""
NULLABLE = {"type": ["string", "null"]}
ERROR_FIELDS = {
    "message": {"type": "string"},
    "type": {"type": "string"},
    "param": NULLABLE,
    "code": {"type": "string"},
}
ERROR_OBJECT = {"type": "object", "required": list(ERROR_FIELDS), "properties": ERROR_FIELDS}
ERROR = {"type": "object", "required": ["error"], "properties": {"error": ERROR_OBJECT}}
BINARY = {"type": "string", "format": "binary"}
LOAD_QUERY = {
    **dict.fromkeys(("lora_name", "adapter_config", "owner"), "string"),
    "idle_ttl_seconds": "number",
    **dict.fromkeys(("load_inplace", "pinned", "public"), "boolean"),
}
TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
HEADERS = {
    # No inline scripts and no external sites: an adapter's name or output can never run as a script.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
FILES = {
    file.name: (content := file.read_bytes(), f'"{hashlib.sha256(content).hexdigest()[:16]}"')
    for file in (files("manylora.doors.http.page") / "static").iterdir()
    if file.name.rpartition(".")[2] in TYPES
}
"""File name -> content, ETag."""
HEAD = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><title>manylora: the API</title>'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    '<link rel="icon" href="/page/icon.svg"><link rel="stylesheet" href="/page/docs.css"><h1>The API</h1>'
    '<p>As a document for programs: <a href="/openapi.json">/openapi.json</a>.</p>'
)
LIMITS = {
    "minimum": "≥",
    "maximum": "≤",
    "minLength": "characters ≥",
    "maxLength": "characters ≤",
    "minItems": "items ≥",
    "maxItems": "items ≤",
    "maxProperties": "entries ≤",
    "pattern": "matches",
}


def page_file(name: str, if_none_match: str = "") -> Response:
    """The file of this name in static/. Raises ApiError 404."""
    found = FILES.get(name)
    if found is None:
        raise ApiError(404, "not_found", "The page has no such file")
    content, tag = found
    headers = {**HEADERS, "ETag": tag}
    if if_none_match == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=TYPES[name.rpartition(".")[2]], headers=headers)


def document(routes: Sequence[tuple[str, str, str]]) -> dict[str, Any]:
    """The OpenAPI document. routes: method, path, name of the handler."""
    reference = "#/components/schemas/{model}"
    _, schemas = models_json_schema(
        [(m, "validation") for m in dict.fromkeys(BODIES.values())], ref_template=reference
    )
    paths: dict[str, dict[str, Any]] = {}
    for method, path, name in routes:
        path = path.replace(":path}", "}")
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, name)
    return {
        "openapi": "3.1.0",
        "info": {"title": "manylora", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**schemas["$defs"], "Error": ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(method: str, path: str, name: str) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    operation = path.strip("/").replace("/", "_").replace("{", "").replace("}", "") or (
        "page" if method == "GET" else "generate_or_stream"
    )
    found: dict[str, Any] = {
        "operationId": f"delete_{operation}" if method == "DELETE" else operation,
        "responses": {"200": {"description": "OK"}, "default": {"description": "Error", "content": error}},
    }
    content: dict[str, Any] = {}
    if "{name}" in path:
        found["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    if name in BODIES:
        content["application/json"] = {"schema": {"$ref": f"#/components/schemas/{BODIES[name].__name__}"}}
    if name in ("adapters.load", "adapters.put"):  # the body may be the adapter's file
        content["application/octet-stream"] = {"schema": BINARY}
        query = LOAD_QUERY if name == "adapters.load" else {"adapter_config": "string"}
        found.setdefault("parameters", []).extend(
            {"name": one, "in": "query", "schema": {"type": kind}} for one, kind in query.items()
        )
    if name == "batches.upload":
        fields = {"file": BINARY, "purpose": {"const": "batch"}}
        form = {"type": "object", "required": list(fields), "properties": fields}
        content["multipart/form-data"] = {"schema": form}
    if content:
        found["requestBody"] = {"required": True, "content": content}
    return found


def docs_page(document: Mapping[str, Any]) -> Response:
    """document: of OpenAPI 3.1."""
    return Response(HEAD + "".join(_parts(document)), media_type=TYPES["html"], headers=HEADERS)


def _parts(document: Mapping[str, Any]) -> Iterator[str]:
    yield "<h2>Endpoints</h2><table>"
    for path, operations in document["paths"].items():
        for method, one in operations.items():
            body = one.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
            yield _row(method.upper(), f"<code>{escape(path)}</code>", "" if body is None else _type(body))
    yield "</table><h2>Objects</h2>"
    for name, one in document["components"]["schemas"].items():
        yield f'<h3 id="{escape(name)}">{escape(name)}</h3><p>{escape(one.get("description", ""))}</p>'
        yield "<table>"
        for field, value in one.get("properties", {}).items():
            need = "" if value.get("default") is None else f"default {escape(str(value['default']))}"
            if field in one.get("required", ()):
                need = "required"
            yield _row(f"<code>{escape(field)}</code>", _type(value), need)
        yield "</table>"


def _row(*cells: str) -> str:
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _type(schema: Mapping[str, Any]) -> str:
    """A schema in a few words, as HTML."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"] if one.get("type") != "null")
    if "enum" in schema or "const" in schema:
        return ", ".join(escape(str(one)) for one in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "any")
    text = escape(", ".join(kind) if isinstance(kind, list) else kind)
    if "items" in schema:
        text += f" of {_type(schema['items'])}"
    limits = [f"{sign} {escape(str(schema[name]))}" for name, sign in LIMITS.items() if name in schema]
    return " ".join([text, *limits])


MAP_MAX_AGE_S = 0.25  # several viewers share one map
MAX_ADAPTERS = 1000  # listed individually; the rest is one entry
REST = "rest"


class CacheStatus:
    """Belongs to its event loop. The engine builds a cache map only when a page asks for it."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._id = secrets.token_hex(4)
        self._secret = secrets.token_bytes(16)
        self._map: CacheMap | None = None
        self._map_time = float("-inf")
        self._map_lock = asyncio.Lock()
        self._sampler = asyncio.create_task(self._sample())

    def close(self) -> None:
        self._sampler.cancel()

    async def snapshot(self, key: ApiKey, changes_after: int, points_after: int) -> dict[str, Any]:
        """The body of GET /v1/cache: what the key may see, and changes and points after the given numbers."""
        async with self._map_lock:
            if time.monotonic() - self._map_time > MAP_MAX_AGE_S:
                self._map = await self._backend.cache_map()
                self._map_time = time.monotonic()
            found = self._map
        history, stats = self._backend.history, self._backend.engine_stats()
        counts = stats.adapters
        last = found.changes[-1].number if found and found.changes else 0
        return {
            "object": "cache",
            "feed": self._id,  # changes at a restart, when numbers start again
            "mapped": found is not None,
            "page_bytes": counts.page_bytes,
            "levels": found
            and {"device": {"pages": found.device_pages}, "host": {"pages": found.host_pages}},
            "adapters": [] if found is None else self._adapters(found, key),
            "changes": [] if found is None else self._changes(found, key, changes_after),
            "last_change": changes_after if found is None else last,
            "counts": {
                "hits": counts.device_hits,
                "device_loads": counts.device_loads,
                "cold_loads": counts.host_stores,
                "device_evictions": counts.device_evictions,
                "host_evictions": counts.host_evictions,
            },
            "point_seconds": POINT_S,
            "points": history.points(points_after),
            "last_minute": history.summary(),
        }

    async def _sample(self) -> None:
        while True:
            await asyncio.sleep(POINT_S)
            try:
                self._backend.history.sample(self._backend.engine_stats())
            except Exception:
                logger.exception("the history of the last minutes lacks a point")

    def _adapters(self, found: CacheMap, key: ApiKey) -> list[dict[str, Any]]:
        """Adapters on the device first, then the most recently used."""
        latest = found.adapters[::-1]
        ordered = [*(one for one in latest if one.device), *(one for one in latest if not one.device)]
        listed = [(self._owner(one, key), [one]) for one in ordered[:MAX_ADAPTERS]]
        if rest := ordered[MAX_ADAPTERS:]:
            listed.append(({"id": REST, "name": None, "who": REST}, rest))
        return [
            {
                **owner,
                "host": [run for one in members for run in one.host],
                "device": [run for one in members for run in one.device],
                "in_use": sum(one.in_use for one in members),
                "hits": sum(one.hits for one in members),
            }
            for owner, members in listed
        ]

    def _changes(self, found: CacheMap, key: ApiKey, after: int) -> list[dict[str, Any]]:
        now = time.monotonic()
        return [
            {
                "number": one.number,
                "age_s": round(max(0.0, now - one.at), 2),
                "level": one.level,
                "loaded": one.loaded,
                "pages": one.pages,
                **self._owner(one, key),
            }
            for one in found.changes
            if one.number > after
        ]

    def _owner(self, one: MappedAdapter | CacheChange, key: ApiKey) -> dict[str, Any]:
        """An opaque id, and the name if the key may see it. who: "former": content that no name refers to
        now.
        """
        owner_of = self._backend.catalog.owner_of
        name = next((name for name in one.names if key.may_see(name, owner_of(name))), None)
        who = "named" if name is not None else "former" if key.sees_all and not one.names else "hidden"
        # Depends on the key, so that different keys cannot compare ids.
        opaque = hashlib.blake2b(f"{key.name}\n{one.digest}".encode(), key=self._secret, digest_size=6)
        return {"id": opaque.hexdigest(), "name": name, "who": who}
