"""Protects against bad input: random requests over the OpenAPI document never hang, crash or tell secrets.

MANYLORA_LONG=1 sends 5,000 of them.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from serving import DEMO, Running

COUNT = 5000 if os.environ.get("MANYLORA_LONG") else 400
STRINGS = [
    "", "a", "demo", "chinese", "demo:japanese", "nobody", "../../etc/passwd", "/etc/passwd", "..", ".",
    "a" * 5000, "\x00", "\ud800", "é\u0301👩‍👩‍👧", "{{ 7 * 7 }}", "%s%n", "'; DROP TABLE", "<script>",
    "C:\\x", "a,b", "\n", "NaN",
]  # fmt: skip
NUMBERS = [0, 1, -1, 2, 7, 128, 2**31, 2**63, -(2**63), 2**64, 10**40, 0.5, -0.1, 1e308, 3.7]
ODD: list[Any] = [None, True, False, [], {}, [[]], {"a": {"b": []}}, [None], *STRINGS, *NUMBERS]
RAW = [
    b"", b"{", b"null", b"[]", b'"a"', b"\xff\xfe", b"{}" * 1000, b"[" * 20000, b'{"a":' * 3000,
    b'{"prompt": NaN}', b'{"prompt": "\xc3("}', b'{"prompt": 1e999}', b'{"prompt": "a", "prompt": 3}',
    b'\xef\xbb\xbf{"prompt": "a"}',
]  # fmt: skip
ANSWERED = ("/v1/completions", "/", "/generate", "/generate_stream", "/api/chat", "/api/generate")
SECRETS = ("Traceback", 'File "', "site-packages", "safetensors_rust", "0x7f")


class Maker:
    """Random values of a JSON schema, and now and then of no schema at all."""

    def __init__(self, rng: random.Random, schemas: dict[str, Any]) -> None:
        self._rng, self._schemas = rng, schemas

    def value(self, schema: Any, depth: int = 0) -> Any:
        rng = self._rng
        if rng.random() < 0.01 or depth > 6:
            return rng.choice(ODD)
        if "$ref" in schema:
            return self.value(self._schemas[schema["$ref"].rpartition("/")[2]], depth)
        if "anyOf" in schema:
            return self.value(rng.choice(schema["anyOf"]), depth)
        for key in ("enum", "const"):
            if key in schema:
                return rng.choice(schema[key]) if key == "enum" else schema[key]
        kind = schema.get("type")
        if kind == "object":
            return self._object(schema, depth)
        if kind == "array":
            items = schema.get("items", {})
            return [self.value(items, depth + 1) for _ in range(rng.choice([0, 1, 1, 2, 3]))]
        if kind == "integer":
            return rng.choice([1, 2, 3, 5] * 8 + [n for n in NUMBERS if isinstance(n, int)])
        if kind == "number":
            return rng.choice([0.0, 0.5, 1.0, 1.5] * 8 + NUMBERS)
        if kind == "boolean":
            return rng.random() < 0.5
        return rng.choice(["a", "demo", "chinese"] * 12 + STRINGS) if kind == "string" else rng.choice(ODD)

    def _object(self, schema: Any, depth: int) -> dict[str, Any]:
        rng, found = self._rng, {}
        properties = schema.get("properties", {})
        wanted = set(schema.get("required", ()))
        share = rng.choice([0.0, 0.05, 0.2])
        for name, one in properties.items():
            if (name in wanted and rng.random() < 0.97) or rng.random() < share:
                found[name] = self.value(one, depth + 1)
        if not properties or rng.random() < 0.02:
            found[rng.choice(STRINGS)] = rng.choice(ODD)
        return found


def requests(seed: int, document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    rng = random.Random(seed)
    maker = Maker(rng, document["components"]["schemas"])
    operations = [
        (path, method, one) for path, ways in document["paths"].items() for method, one in ways.items()
    ]
    posts = [one for one in operations if one[1] == "post"]
    posts += 4 * [one for one in posts if one[0] == "/v1/completions"]
    for _ in range(COUNT):
        path, method, operation = rng.choice(posts if rng.random() < 0.8 else operations)
        if "{name}" in path:
            path = path.replace(
                "{name}", rng.choice(["chinese", "nobody", "..%2f..", "%00", "a/b", "%ff", "x" * 300])
            )
        headers = {
            "content-type": rng.choice(["application/json"] * 20 + ["text/plain", "", "application/xml"])
        }
        if rng.random() < 0.1:
            headers["authorization"] = rng.choice(["Bearer x", "Basic eA==", "Bearer", "x"])
        body = b""
        if method == "post":
            content = operation.get("requestBody", {}).get(
                "content", {}
            )  # files and batches may have other bodies
            made = maker.value(content.get("application/json", {}).get("schema", {}))
            body = rng.choice(RAW) if rng.random() < 0.1 else json.dumps(made).encode()
            if rng.random() < 0.03:
                body = body[: rng.randrange(len(body) + 1)]
        if rng.random() < 0.03:
            method = rng.choice(["delete", "put", "patch", "options", "head"])
        yield {"method": method.upper(), "url": path, "headers": headers, "content": body}


def complaint(server: Running, request: dict[str, Any]) -> str | None:
    """What is wrong with the answer."""
    try:
        answer = server.http.request(**request, timeout=60)
    except httpx2.HTTPError as error:
        return f"{type(error).__name__}: no answer"
    of_ollama = request["url"].startswith("/api/")
    return complaint_about(answer.status_code, answer.text, request["method"], of_ollama=of_ollama)


def complaint_about(status: int, text: str, method: str, *, of_ollama: bool = False) -> str | None:
    """of_ollama: an error is only a text in that API."""
    if status >= 500 or '"internal_error"' in text:
        return f"{status} {text[:300]}"
    if status >= 400 and method != "HEAD":
        try:
            whole = json.loads(text)
            error = whole["error"]
        except (ValueError, LookupError, TypeError):
            return f"{status} has no error object: {text[:300]}"
        if of_ollama:
            return None if isinstance(error, str) and "\n" not in error else f"no text: {text[:300]}"
        if "error_type" in whole:  # TGI's
            return None if isinstance(error, str) else f"no text: {text[:300]}"
        if whole.get("type") == "error":  # Anthropic's
            return None if set(error) == {"type", "message"} else f"not its error object: {text[:300]}"
        if set(error) != {"message", "type", "param", "code"} or not isinstance(error["code"], str):
            return f"not the error object: {text[:300]}"
    told = [one for one in (*SECRETS, str(DEMO), str(Path.home()) + "/") if one in text]
    return f"tells {told}: {text[:300]}" if told else None


@pytest.mark.timeout(1500)
def test_hostile_requests_are_answered_in_order(caplog: pytest.LogCaptureFixture) -> None:
    server = Running(
        lora_root=(DEMO / "adapters",), allow_runtime_lora_updating=True, max_seq_len=48, drain_seconds=1.0
    )
    try:
        document = server.http.get("/openapi.json").json()
        sent = list(requests(11, document))
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda request: complaint(server, request), sent))
        wrong = [(text, request) for text, request in zip(found, sent, strict=True) if text]
        assert not wrong, f"{len(wrong)} of {COUNT}, as {wrong[:3]}"
        assert server.http.get("/health/model").status_code == 200
        count = 'manylora_http_requests_total{{route="{}",status="200"}}'
        served = sum(server.metric(count.format(route)) for route in ANSWERED)
        assert served > COUNT / 50, "nearly nothing was served: the requests are too bad for a test"
    finally:
        server.close()
    assert not [one for one in caplog.records if one.levelname in ("ERROR", "CRITICAL")]
