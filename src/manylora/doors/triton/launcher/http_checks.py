"""Checks of HTTP requests before tritonserver, whose own parsers may crash beyond these limits."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import httptools
import numpy as np

from manylora.doors.triton.launcher.server_command import MANAGEMENT_HEADER

MAX_HEADERS = 128
SHORT_HEAD = 1024  # bytes
MAX_JSON = 2**24  # bytes of JSON in a body; parsed, it takes about twenty times as many
TOO_LONG = 413, f"a body, or its part that is JSON, may have at most {MAX_JSON} bytes"
MAX_BODY = 5 * 2**28  # bytes, JSON and tensors: 1.25 GiB
MAX_INFER_JSON = 2**22  # bytes; it is also parsed here, while other requests wait
SLICE = 2**18
MAX_DEPTH = 64  # nested lists and objects; the server's parser recurses for each
MAX_KEYS = 1000  # of all objects; the server looks each up among all others: 40,000 keys take it 5 s

LENGTH, JSON_LENGTH, CODING = b"content-length", b"inference-header-content-length", b"transfer-encoding"
# They would mean different things to different readers if they came twice.
SINGLE = {LENGTH, JSON_LENGTH, CODING, b"host", b"expect", b"content-encoding", MANAGEMENT_HEADER.encode()}
# Of this connection alone. `upgrade` may be ignored (RFC 9110, 7.8): the request is answered in HTTP/1.1.
OWN = {b"connection", b"keep-alive", b"proxy-connection", b"upgrade", b"http2-settings", b"te", b"trailer"}
DROPPED = OWN | {LENGTH, CODING, b"expect", b"content-encoding"}
# Without escapes, empty parts and dots, each path has one reading.
PART = rb"[\w~!$&'()*+,;=:@-][\w.~!$&'()*+,;=:@-]*"
REQUEST = re.compile(rb"([A-Z]{1,20}) (/|(?:/" + PART + rb")+/?)(\?[!$-;=?-Z_a-z~\[\]%]*)? HTTP/1\.([01])")
FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t -~\x80-\xff]*)")
PUBLIC = re.compile(  # everything else requires the secret from the client
    rb"/v2/?|/v2/health/(?:live|ready)|/v2/models/stats"
    rb"|/v2/models/[^/]+(?:/versions/\d+)?(?:/(infer|generate|generate_stream|ready|config|stats))?"
)


class RefusedError(Exception):
    """Refuses a request. status and one sentence for the client."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def check_json(text: bytes, inference: bool) -> None:
    """Raises RefusedError. inference: whether it is an `infer` request, whose shapes are checked."""
    depth, keys = _depth_and_keys(text)
    if depth > MAX_DEPTH:
        raise RefusedError(400, f"the request's JSON is nested more than {MAX_DEPTH} deep")
    if keys > MAX_KEYS:
        raise RefusedError(400, f"the objects of a request's JSON may have at most {MAX_KEYS} keys together")
    if not inference:
        return
    if len(text) > MAX_INFER_JSON:
        raise RefusedError(
            413, f"the JSON of an infer request may have at most {MAX_INFER_JSON} bytes: send binary tensors"
        )
    try:
        told = json.loads(str(text, "utf-8"), object_pairs_hook=_object)
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


def _depth_and_keys(text: bytes) -> tuple[int, int]:
    """Not less than they are; exactly, where there may be too many. In slices, to use little memory."""
    opened, colons = text.count(b"[") + text.count(b"{"), text.count(b":")
    if opened <= MAX_DEPTH and colons <= MAX_KEYS:
        return opened, colons
    plain = text.replace(b"\\\\", b"").replace(b'\\"', b"")  # each remaining quote starts or ends a string
    quotes = depth = deepest = keys = 0
    for start in range(0, len(plain), SLICE):
        signs = np.frombuffer(plain, np.uint8, min(SLICE, len(plain) - start), start)
        inside = quotes + np.cumsum(signs == ord('"'), dtype=np.int32)
        outside = inside % 2 == 0
        opening, closing = ((signs == ord(a)) | (signs == ord(b)) for a, b in ("[{", "]}"))
        depths = depth + np.cumsum((opening.astype(np.int8) - closing) * outside, dtype=np.int32)
        deepest = max(deepest, int(depths.max()))
        keys += int(np.count_nonzero(outside & (signs == ord(":"))))
        if deepest > MAX_DEPTH or keys > MAX_KEYS:
            break
        quotes, depth = int(inside[-1]) % 2, int(depths[-1])
    return deepest, keys


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
class Head:
    """A request line and headers that have one meaning only.

    endpoint: `infer`, `generate`, …, if it is one of a model. headers: names in lower case, with values.
    length: of the body in bytes; None: it comes in chunks. json_length: bytes of JSON at the start of an
    `infer` body, if given; tensors follow.
    """

    method: bytes
    path: bytes
    endpoint: bytes | None
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    length: int | None
    json_length: int | None
    compressed: bool
    keeps: bool  # the connection, for another request
    expects: bool  # that it is told to send the body

    @property
    def checked_length(self) -> int | None:
        """How many bytes of the body have to be seen before it is forwarded. None: all."""
        if self.length is None or self.compressed or self.json_length is None:
            return self.length
        return min(self.json_length, self.length)


def read_head(text: bytes) -> Head:
    """text: without the empty line at its end. Raises RefusedError, also for what is ambiguous."""
    return _read_short_head(text) if len(text) <= SHORT_HEAD else _read_head(text)


def _read_head(text: bytes) -> Head:
    first, *lines = text.split(b"\r\n")
    request = REQUEST.fullmatch(first)
    if request is None:
        raise RefusedError(
            400,
            "the first line must be METHOD /path HTTP/1.1; a path has no % and //, and no part begins with .",
        )
    method, path, query, minor = request.groups(b"")
    if method not in (b"GET", b"POST"):
        raise RefusedError(405, f"method {method.decode()} is not allowed: use GET or POST")
    if len(lines) > MAX_HEADERS:
        raise RefusedError(431, f"a request may have at most {MAX_HEADERS} headers, got {len(lines)}")
    headers = []
    for line in lines:
        if (field := FIELD.fullmatch(line)) is None:
            raise RefusedError(400, "each header must be one line NAME: VALUE")
        headers.append((field[1].lower(), field[2].rstrip(b" \t")))
    values, names = dict(headers), [name for name, _ in headers]
    if len(values) < len(headers):
        for name in SINGLE:
            if names.count(name) > 1:
                raise RefusedError(400, f"header {name.decode()} comes twice")
    connection = b",".join(value for name, value in headers if name == b"connection").lower()
    length = None if CODING in values else _number(values, LENGTH, MAX_BODY) or 0
    if CODING in values and values[CODING].lower() != b"chunked":
        raise RefusedError(501, "header transfer-encoding may only be chunked")
    if CODING in values and (LENGTH in values or minor == b"0"):
        raise RefusedError(400, "transfer-encoding needs HTTP/1.1, and excludes content-length")
    coding = values.get(b"content-encoding", b"").lower()
    if coding not in (b"identity", b"", b"gzip", b"deflate"):
        raise RefusedError(415, "content-encoding must be gzip, deflate or identity")
    expect = values.get(b"expect", b"").lower()
    if expect not in (b"", b"100-continue"):
        raise RefusedError(417, "header expect may only be 100-continue")
    endpoint = found[1] if (found := PUBLIC.fullmatch(path)) else None
    has_json = JSON_LENGTH in values and endpoint == b"infer"  # the server ignores it elsewhere
    head = Head(
        method=method,
        path=path,
        endpoint=endpoint,
        query=query,
        headers=tuple(headers),
        length=length,
        json_length=_number(values, JSON_LENGTH, MAX_JSON) if has_json else None,
        compressed=coding in (b"gzip", b"deflate"),
        keeps=minor == b"1" and b"close" not in [one.strip() for one in connection.split(b",")],
        expects=bool(expect),
    )
    if (head.checked_length or 0) > MAX_JSON:
        raise RefusedError(*TOO_LONG)
    return head


# A client sends the same head again and again.
_read_short_head = lru_cache(256)(_read_head)


def forwarded_head(head: Head, length: int, secret: bytes, is_open: bool) -> bytes:
    """length: of the body to send. secret: for requests that need no permission; is_open: for all."""
    management = MANAGEMENT_HEADER.encode()
    is_public = is_open or PUBLIC.fullmatch(head.path)
    lines = [head.method + b" " + head.path + head.query + b" HTTP/1.1"]
    lines += [
        name + b": " + value
        for name, value in head.headers
        if name not in DROPPED
        and not (name == management and is_public)
        and not (name == JSON_LENGTH and head.json_length is None)
    ]
    if is_public:
        lines.append(management + b": " + secret)
    lines.append(b"content-length: %d" % length)
    return b"\r\n".join(lines) + b"\r\n\r\n"


def _number(values: Mapping[bytes, bytes], name: bytes, most: int) -> int | None:
    text = values.get(name)
    if text is None:
        return None
    if not re.fullmatch(rb"\d{1,18}", text):
        raise RefusedError(400, f"header {name.decode()} must be a whole number")
    if int(text) > most:
        raise RefusedError(413, f"header {name.decode()} may be at most {most}, got {int(text)}")
    return int(text)


class ChunkedBody:
    """Joins the chunks of a request's body. exceeded: whether something followed it."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.ended = self.exceeded = self._begun = False
        self._parser = httptools.HttpRequestParser(self)
        self._parser.feed_data(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
        self._begun = True

    def feed(self, data: bytes) -> None:
        """Raises RefusedError."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, RefusedError):  # raised by one of the methods below
                raise error.__context__ from None
            if not self.ended:
                raise RefusedError(400, "the chunks of the body cannot be read") from error
            self.exceeded = True

    # Called by the parser.

    def on_message_begin(self) -> None:
        self.exceeded = self.ended

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._begun and not self.ended:
            raise RefusedError(400, "headers after the body (trailers) are not supported")

    def on_body(self, data: bytes) -> None:
        if not self.ended:
            self.body += data
            if len(self.body) > MAX_JSON:
                raise RefusedError(*TOO_LONG)

    def on_message_complete(self) -> None:
        self.ended = True
