"""Protects tritonserver's readers of HTTP and JSON: what they could understand in another way than our
checks, or take too long for, does not reach them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest

from manylora.doors.triton.launcher import http_checks
from manylora.doors.triton.launcher.http_checks import (
    MAX_DEPTH,
    MAX_INFER_JSON,
    MAX_KEYS,
    RefusedError,
    check_json,
    forwarded_head,
    read_head,
)


def nested(depth: int, inner: str = '"[[{{"') -> bytes:
    return b"[" * depth + inner.encode() + b"]" * depth


@pytest.mark.parametrize("size", [7, 64, 2**18])
def test_only_brackets_outside_of_texts_count(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever slice a bracket, a quote or an escape lies in."""
    monkeypatch.setattr(http_checks, "SLICE", size)
    picks = random.Random(1)
    words = ["[", "{" * 90, "\\", '"', "]" * 70, 'a\\"[', "\\\\", "é", ""]
    for _ in range(50):
        text = json.dumps(["".join(picks.choices(words, k=9)) for _ in range(20)], ensure_ascii=False)
        check_json(nested(MAX_DEPTH - 1, text), False)
        with pytest.raises(RefusedError, match="nested more than 64 deep"):
            check_json(nested(MAX_DEPTH, text), False)
    check_json(b"[]" * 1000 + b"]" * 1000, False)  # not JSON, which is for the server to say


@pytest.mark.parametrize("inputs", [[1], [None], ["data"], [[]], {}, "a", [{"shape": 3, "data": []}]])
def test_inputs_that_are_no_tensors_are_left_to_the_server(inputs: object) -> None:
    check_json(json.dumps({"inputs": inputs}).encode(), True)


def test_json_that_is_read_here_has_a_bound_of_its_own() -> None:
    text = b'{"inputs":[]}' + b" " * MAX_INFER_JSON
    check_json(text, False)
    with pytest.raises(RefusedError, match="send binary tensors"):
        check_json(text, True)


GENERATE, INFER = b"/v2/models/m/generate", b"/v2/models/m/infer"
JSON_LENGTH = b"Inference-Header-Content-Length: 3"


def head(*lines: bytes, first: bytes = b"POST " + INFER + b" HTTP/1.1") -> bytes:
    return b"\r\n".join([first, b"Host: x", *lines])


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        (head(b"Content-Length: 3", b"content-length: 3"), 400, "content-length comes twice"),
        (head(b"Content-Length: 3, 3"), 400, "must be a whole number"),
        (head(b"Content-Length: 0x3"), 400, "must be a whole number"),
        (head(b"Content-Length: %d" % 10**12), 413, "may be at most 1342177280"),
        (head(JSON_LENGTH, JSON_LENGTH), 400, "comes twice"),
        (head(b"Content-Length: 3", b"Transfer-Encoding: chunked"), 400, "excludes content-length"),
        (head(b"Transfer-Encoding: gzip, chunked"), 501, "may only be chunked"),
        (head(b"Transfer-Encoding:\x0bchunked"), 400, "one line NAME: VALUE"),
        (head(b"Transfer-Encoding: chunked", first=b"POST /v2 HTTP/1.0"), 400, "needs HTTP/1.1"),
        (head(b"Host: y"), 400, "host comes twice"),
        (head(b"manylora-management: a", b"Manylora-Management: b"), 400, "comes twice"),
        (head(b"a: b", b" c"), 400, "one line NAME: VALUE"),
        (head(b"Content-Length : 3"), 400, "one line NAME: VALUE"),
        (head(b"a b: c"), 400, "one line NAME: VALUE"),
        (head(b"a: b\nContent-Length: 3"), 400, "one line NAME: VALUE"),
        (head(b"a: \0"), 400, "one line NAME: VALUE"),
        (head(b"Content-Encoding: br"), 415, "gzip, deflate or identity"),
        (head(*[b"a: b"] * 128), 431, "at most 128 headers, got 129"),
        (head(b"Expect: a"), 417, "may only be 100-continue"),
        (head(b"Content-Length: %d" % 2**25), 413, "its part that is JSON"),
        (head(b"Content-Length: 17000000", JSON_LENGTH, first=b"POST /v2 HTTP/1.1"), 413, "that is JSON"),
        (head(first=b"CONNECT x:80 HTTP/1.1"), 400, "must be METHOD /path HTTP/1.1"),
        (head(first=b"CONNECT / HTTP/1.1"), 405, "use GET or POST"),
        (head(first=b"get / HTTP/1.1"), 400, "must be METHOD /path HTTP/1.1"),
        (head(first=b"GET / HTTP/1.2"), 400, "must be METHOD /path HTTP/1.1"),
        (head(first=b"PRI * HTTP/2.0"), 400, "must be METHOD /path HTTP/1.1"),
        *(
            (head(first=b"POST " + path + b" HTTP/1.1"), 400, "a path has no % and //")
            for path in (
                b"/v2/models/m/%69nfer", b"/v2/models/m//infer", b"/v2/../v2", b"http://x/v2", b"v2", b"*",
                b"/v2\\a", b"/v2/\xc3\xa9", b"/v2?a#b", b"/v2\ta",
            )
        ),
    ],
)  # fmt: skip
def test_what_two_readers_could_understand_differently_is_refused(
    text: bytes, status: int, words: str
) -> None:
    with pytest.raises(RefusedError, match=words) as refused:
        read_head(text)
    assert refused.value.status == status


def sent(text: bytes, length: int = 0) -> bytes:
    return forwarded_head(read_head(text), length, b"SECRET", False)


def test_the_server_gets_one_length_and_nothing_that_is_the_connections() -> None:
    own = [
        b"Connection: Upgrade, HTTP2-Settings",
        b"Upgrade: h2c",
        b"HTTP2-Settings: AAMAAABkAAQAAP",
        b"TE: a",
    ]
    own += [
        b"Expect: 100-Continue",
        b"Keep-Alive: 5",
        b"Content-Encoding: gzip",
        b"Transfer-Encoding: chunked",
    ]
    assert sent(head(*own, b"X-A:  b c\t", b"manylora-management: mine"), 7) == (
        b"POST /v2/models/m/infer HTTP/1.1\r\nhost: x\r\nx-a: b c\r\n"
        b"manylora-management: SECRET\r\ncontent-length: 7\r\n\r\n"
    )
    assert b"mine" in sent(head(b"manylora-management: mine", first=b"POST /v2/logging HTTP/1.1"))
    assert b"SECRET" not in sent(head(first=b"POST /v2/logging HTTP/1.1"))


@pytest.mark.parametrize(
    ("path", "seen"),
    [(INFER, 3), (INFER.replace(b"m/", b"m/versions/1/"), 3), (INFER + b"?a=/generate", 3), (GENERATE, 9),
     (GENERATE + b"?a=/infer", 9), (b"/v2/logging/infer", 9), (INFER + b"/", 9)],
)  # fmt: skip
def test_a_length_of_json_counts_where_the_server_heeds_it(path: bytes, seen: int) -> None:
    text = head(b"Content-Length: 9", JSON_LENGTH, first=b"POST " + path + b" HTTP/1.1")
    assert read_head(text).checked_length == seen
    assert (b"inference-header-content-length: 3" in sent(text)) == (seen == 3)
    assert read_head(text + b"\r\nContent-Encoding: gzip").checked_length == 9


@pytest.mark.parametrize(
    ("first", "connection", "keeps"),
    [(b"GET / HTTP/1.1", b"keep-alive", True), (b"GET / HTTP/1.1", b"a , Close", False),
     (b"GET / HTTP/1.0", b"keep-alive", False)],
)  # fmt: skip
def test_who_wants_to_close_is_heard(first: bytes, connection: bytes, keeps: bool) -> None:
    assert read_head(head(b"Connection: " + connection, first=first)).keeps == keeps


@pytest.mark.parametrize("make", [
    lambda n: {f"k{i}": 1 for i in range(n)},
    lambda n: [{"a": 1}] * n,
    lambda n: {"a": {f":{i}": ":::" for i in range(n - 1)}},
])  # fmt: skip
def test_keys_are_counted_wherever_they_are(make: Callable[[int], object]) -> None:
    """The server takes a time for them that grows with their square."""
    check_json(json.dumps(make(MAX_KEYS)).encode(), False)
    with pytest.raises(RefusedError, match="at most 1000 keys together"):
        check_json(json.dumps(make(MAX_KEYS + 1)).encode(), False)
    check_json(json.dumps({"text": ":" * 5000 + '":' * 5000}).encode(), False)
