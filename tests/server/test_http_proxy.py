"""Protects tritonserver's HTTP port: what would end it is refused before it, and all else goes through."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
import urllib.error
import urllib.request
import zlib

import pytest
from launched import goes_on, processes
from servers import Running

GENERATE = "/v2/models/ensemble/generate"
INFER = "/v2/models/postprocessing/infer"
TOKENS = {"name": "TOKENS_BATCH", "datatype": "INT32", "shape": [1, 1, 1], "data": [66]}
LENGTHS = {"name": "SEQUENCE_LENGTH", "datatype": "INT32", "shape": [1, 1], "data": [1]}
DEEP = b"[" * 1_000_000


def infer(**tokens: object) -> bytes:
    return json.dumps({"inputs": [TOKENS | tokens, LENGTHS]}).encode()


def post(server: Running, path: str, body: bytes, **headers: str) -> tuple[int, bytes]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(f"http://127.0.0.1:{server.http}{path}", body, named)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def raw(server: Running, *parts: bytes) -> bytes:
    """What comes back on a connection of its own, until that is closed."""
    with socket.create_connection(("127.0.0.1", server.http), timeout=60) as connection:
        for part in parts:
            connection.sendall(part)
        return rest(connection)


def rest(connection: socket.socket) -> bytes:
    """What comes until the connection is closed."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


def chunked(path: str, chunks: int) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head.encode() + b"1\r\na\r\n" * chunks + b"0\r\n\r\n"


REFUSED = {
    "deep text": (GENERATE, b'{"text_input":' + DEEP, {}, 400, b"nested more than 64 deep"),
    "deep parameters": (GENERATE, b'{"parameters":{"a":' + DEEP, {}, 400, b"nested more than 64 deep"),
    "deep data": (INFER, b'{"inputs":[{"data":' + DEEP, {}, 400, b"nested more than 64 deep"),
    "deep objects": (INFER, b'{"a":' * 200_000, {}, 400, b"nested more than 64 deep"),
    "deep management": ("/v2/logging", DEEP, {}, 400, b"nested more than 64 deep"),
    "deep compressed": (INFER, gzip.compress(DEEP), {"Content_Encoding": "gzip"}, 400, b"nested"),
    "length of JSON": (GENERATE, b'{}{"text_input":' + DEEP, {"Inference_Header_Content_Length": "2"}, 400,
                       b"nested more than 64 deep"),
    "many keys": (GENERATE, json.dumps({f"k{i}": 1 for i in range(200_000)}).encode(), {}, 400, b"1000 keys"),
    "shape": (INFER, infer(shape=[1, 2**45, 1]), {}, 400, b"fewer elements than its shape"),
    "overflow": (INFER, infer(shape=[1, 2**62 + 1, 1], data=[7] * 50_000), {}, 400, b"fewer elements"),
    "two shapes": (INFER, infer().replace(b'"shape"', b'"shape":[1,35184372088832,1],"shape"', 1), {}, 400,
                   b"two entries of one name"),
    "bomb": (INFER, zlib.compress(bytes(2**26)), {"Content_Encoding": "deflate"}, 413, b"may hold at most"),
    "no gzip": (INFER, b"abc", {"Content_Encoding": "gzip"}, 400, b"cannot be read"),
    "encoding": (INFER, b"abc", {"Content_Encoding": "br"}, 415, b"must be gzip, deflate or identity"),
    "header": (GENERATE, b"{}", {"Long": "a" * 70_000}, 431, b"at most 65536 bytes"),
}  # fmt: skip


@pytest.fixture(scope="module")
def before(server: Running) -> dict[str, int]:
    return processes(server)


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_end_the_server_is_refused(server: Running, before: dict[str, int], what: str) -> None:
    path, body, headers, status, words = REFUSED[what]
    found, said = post(server, path, body, **headers)
    assert (found, words in said) == (status, True), said[:300]
    assert json.loads(said)["error"]
    assert goes_on(server, before)


def test_a_body_of_very_many_chunks_is_one_piece_to_the_server(
    server: Running, before: dict[str, int]
) -> None:
    for path in (GENERATE, "/v2/logging"):
        assert raw(server, chunked(path, 600_000)).startswith((b"HTTP/1.1 500", b"HTTP/1.1 403"))
    assert goes_on(server, before)


@pytest.mark.parametrize(
    "path", ["/v2//logging", "/v2/repository/index", "/v2/%6cogging", "http://x/v2/logging"]
)
def test_no_way_of_writing_a_path_opens_management(server: Running, path: str) -> None:
    said = raw(server, f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    assert said.split(b" ")[1] == (b"403" if path == "/v2/repository/index" else b"400"), said


def test_what_is_sound_goes_through(server: Running) -> None:
    plain = post(server, INFER, infer())
    assert plain[0] == 200
    for pack, name in ((gzip.compress, "gzip"), (zlib.compress, "deflate")):
        assert post(server, INFER, pack(infer()), Content_Encoding=name) == plain
    body = json.dumps({"text_input": '[[{{\\"' * 20, "max_tokens": 2}).encode()
    assert post(server, GENERATE, body)[0] == 200
    head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(infer())}\r\n"
    first, last = head.encode() + b"\r\n", head.encode() + b"Connection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.http), timeout=60) as connection:
        for piece in (first, infer()[:20], infer()[20:]):
            connection.sendall(piece)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert b'"data":["c"]' in answer.read()
        connection.sendall(last + infer())
        assert b'"data":["c"]' in rest(connection)
