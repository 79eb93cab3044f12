"""Checks of HTTP requests before they reach tritonserver, with limits beyond which its own parsers may
crash.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from manylora.launcher.management_access import MANAGEMENT_HEADER

MAX_JSON = 2**24  # bytes of JSON in a body; parsed, it takes about twenty times as many
MAX_BODY = 5 * 2**28  # bytes, JSON and tensors: 1.25 GiB
MAX_INFER_JSON = 2**22  # bytes; it is also parsed here, while other requests wait
SLICE = 2**18
MAX_DEPTH = 64  # nested lists and objects; the server's parser recurses for each

Headers = Sequence[tuple[bytes, bytes]]
"""Names in lower case, with values."""

LENGTH, JSON_LENGTH = b"content-length", b"inference-header-content-length"
DROPPED = {b"connection", LENGTH, b"transfer-encoding", b"expect", b"keep-alive"}
PUBLIC = re.compile(  # everything else requires the secret from the client
    rb"/v2/?|/v2/health/(?:live|ready)|/v2/models/stats"
    rb"|/v2/models/[^/]+(?:/versions/\d+)?(?:/(?:infer|generate|generate_stream|ready|config|stats))?"
)


class RefusedError(Exception):
    """Refuses a request. status and one sentence for the client."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def check_json(text: bytes, inference: bool) -> None:
    """Raises RefusedError. inference: whether it is an `infer` request, whose shapes are checked."""
    if _is_deep(text):
        raise RefusedError(400, f"the request's JSON is nested more than {MAX_DEPTH} deep")
    if inference:
        if len(text) > MAX_INFER_JSON:
            raise RefusedError(
                413,
                f"the JSON of an infer request may have at most {MAX_INFER_JSON} bytes: send binary tensors",
            )
        _check_shapes(text)


def _is_deep(text: bytes) -> bool:
    """Works on a slice at a time, so that other connections are served in between and little memory is
    used.
    """
    plain = text.replace(b"\\\\", b"").replace(b'\\"', b"")  # each remaining quote starts or ends a string
    quotes = depth = 0
    for start in range(0, len(plain), SLICE):
        signs = np.frombuffer(plain, np.uint8, min(SLICE, len(plain) - start), start)
        inside = quotes + np.cumsum(signs == ord('"'), dtype=np.int32)
        opening, closing = ((signs == ord(a)) | (signs == ord(b)) for a, b in ("[{", "]}"))
        steps = (opening.astype(np.int8) - closing) * (inside % 2 == 0)
        depths = depth + np.cumsum(steps, dtype=np.int32)
        if depths.max() > MAX_DEPTH:
            return True
        quotes, depth = int(inside[-1]) % 2, int(depths[-1])
    return False


def _check_shapes(text: bytes) -> None:
    try:
        told = json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, "failed to parse the request JSON buffer") from error
    inputs = told.get("inputs") if isinstance(told, dict) else None
    for tensor in inputs if isinstance(inputs, list) else ():
        shape = tensor.get("shape") if isinstance(tensor, dict) else None
        if not isinstance(shape, list) or "data" not in tensor:
            continue
        sizes = [size for size in shape if isinstance(size, int)]
        if prod(size for size in sizes if size) > len(text):
            raise RefusedError(
                400, f"input {tensor.get('name')}: its data has fewer elements than its shape {sizes} says"
            )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse duplicate keys: the server uses the first of them, Python the last."""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise RefusedError(400, "the request's JSON has two entries of one name in an object")
    return made


def inflate(body: bytes) -> bytes:
    """Decompress gzip or zlib to at most MAX_JSON bytes. Raises RefusedError."""
    reader = zlib.decompressobj(wbits=15 | 32)
    try:
        plain = reader.decompress(body, MAX_JSON)
    except zlib.error as error:
        raise RefusedError(400, "the compressed body cannot be read") from error
    if reader.unconsumed_tail:
        raise RefusedError(413, f"a compressed body may hold at most {MAX_JSON} bytes")
    if not reader.eof:
        raise RefusedError(400, "the compressed body is cut off")
    return plain


@dataclass(frozen=True)
class BodyInfo:
    """length: of the body in bytes, if given. json_length: bytes of JSON at its start, if given; tensors
    follow.
    """

    length: int | None = None
    json_length: int | None = None
    compressed: bool = False

    @property
    def checked_length(self) -> int | None:
        """How many bytes have to be checked. None: all."""
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
    """length: of the body to send. secret: added to requests that need no permission, and to all if
    is_open.
    """
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
