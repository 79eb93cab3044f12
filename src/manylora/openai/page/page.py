"""The static files of the status page, and the API's documentation as a page."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from html import escape
from importlib.resources import files
from typing import Any

from starlette.responses import Response

from manylora.openai.api.errors import ApiError

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


def _read() -> dict[str, tuple[bytes, str]]:
    found = {}
    for file in (files("manylora.openai.page") / "static").iterdir():
        if file.name.rpartition(".")[2] in TYPES:
            content = file.read_bytes()
            found[file.name] = (content, f'"{hashlib.sha256(content).hexdigest()[:16]}"')
    return found


FILES = _read()
"""File name -> content, ETag."""


HEAD = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><title>manylora: the API</title>'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    '<link rel="stylesheet" href="/page/docs.css"><h1>The API</h1>'
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


def docs_page(document: Mapping[str, Any]) -> Response:
    """document: of OpenAPI 3.1."""
    content = HEAD + "".join(_endpoints(document)) + "".join(_models(document))
    return Response(content, media_type=TYPES["html"], headers=HEADERS)


def _endpoints(document: Mapping[str, Any]) -> Iterator[str]:
    yield "<h2>Endpoints</h2><table>"
    for path, operations in document["paths"].items():
        for method, one in operations.items():
            body = one.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
            cells = (method.upper(), f"<code>{escape(path)}</code>", "" if body is None else _type(body))
            yield "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    yield "</table>"


def _models(document: Mapping[str, Any]) -> Iterator[str]:
    yield "<h2>Objects</h2>"
    for name, schema in document["components"]["schemas"].items():
        yield f'<h3 id="{escape(name)}">{escape(name)}</h3><p>{escape(schema.get("description", ""))}</p>'
        yield "<table>"
        for field, one in schema.get("properties", {}).items():
            need = "required" if field in schema.get("required", ()) else _default(one)
            cells = (f"<code>{escape(field)}</code>", _type(one), need)
            yield "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
        yield "</table>"


def _default(schema: Mapping[str, Any]) -> str:
    return f"default {escape(str(schema['default']))}" if schema.get("default") is not None else ""


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
