"""The static files of the status page."""

from __future__ import annotations

import hashlib
from importlib.resources import files

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
