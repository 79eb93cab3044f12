"""The head of an HTTP request: what it says of the body, and what of it goes on to tritonserver."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from manylora.launcher.http_checks import MAX_BODY, MAX_JSON, RefusedError
from manylora.launcher.management_access import MANAGEMENT_HEADER

Headers = Sequence[tuple[bytes, bytes]]
"""Names in lower case, and values."""

LENGTH, JSON_LENGTH = b"content-length", b"inference-header-content-length"
DROPPED = {b"connection", LENGTH, b"transfer-encoding", b"expect", b"keep-alive"}
PUBLIC = re.compile(  # whatever else there is needs the client's own secret
    rb"/v2/?|/v2/health/(?:live|ready)|/v2/models/stats"
    rb"|/v2/models/[^/]+(?:/versions/\d+)?(?:/(?:infer|generate|generate_stream|ready|config|stats))?"
)


@dataclass(frozen=True)
class BodyInfo:
    """length: bytes, if given. json_length: bytes of JSON, if given, before the rest, which is tensors."""

    length: int | None = None
    json_length: int | None = None
    compressed: bool = False

    @property
    def checked_length(self) -> int | None:
        """How much has to be checked; None: all."""
        return None if self.length is None or self.compressed else self.json_length


def body_info(headers: Headers) -> BodyInfo:
    """Raises RefusedError."""
    values = dict(headers)
    length = _number(values, LENGTH, MAX_BODY)
    lengths = [name for name, _ in headers if name in (LENGTH, JSON_LENGTH)]
    if len(lengths) > len(set(lengths)):
        raise RefusedError(400, "a header that gives a length comes twice")
    encoding = values.get(b"content-encoding", b"identity").strip().lower()
    if encoding not in (b"identity", b"", b"gzip", b"deflate"):
        raise RefusedError(415, "content-encoding must be gzip, deflate or identity")
    return BodyInfo(length, _number(values, JSON_LENGTH, MAX_JSON), encoding in (b"gzip", b"deflate"))


def forwarded_head(
    method: bytes, url: bytes, headers: Headers, body: BodyInfo, length: int, secret: bytes, is_open: bool
) -> bytes:
    """length: of the body that is sent. secret: added where anybody may ask, and everywhere if is_open."""
    dropped = DROPPED | ({b"content-encoding"} if body.compressed else set())
    management = MANAGEMENT_HEADER.encode()
    is_public = is_open or PUBLIC.fullmatch(path_of(url))
    lines = [method + b" " + url + b" HTTP/1.1"]
    lines += [
        name + b": " + value
        for name, value in headers
        if name not in dropped and not (is_public and name == management)
    ]
    if is_public:
        lines.append(management + b": " + secret)
    lines.append(b"content-length: %d" % length)
    return b"\r\n".join(lines) + b"\r\n\r\n"


def path_of(url: bytes) -> bytes:
    return url.partition(b"?")[0]


def _number(values: Mapping[bytes, bytes], name: bytes, most: int) -> int | None:
    text = values.get(name)
    if text is None:
        return None
    if not re.fullmatch(rb"\d{1,18}", text.strip()):
        raise RefusedError(400, f"header {name.decode()} must be a whole number")
    if int(text) > most:
        raise RefusedError(413, f"header {name.decode()} may be at most {most}, got {int(text)}")
    return int(text)
