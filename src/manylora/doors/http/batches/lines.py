"""The requests of a batch, one JSON object per line, as in OpenAI's Batch API and vLLM's run-batch: reads
them, answers them by asking an ASGI application, and keeps the answers in a file meanwhile.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from starlette.types import ASGIApp, Message

from manylora.doors.http.api.errors import ApiError
from manylora.doors.http.api.parsing import read_object
from manylora.errors import ConfigError

ENDPOINTS = (
    *(f"/v1/{name}" for name in ("chat/completions", "completions", "responses", "embeddings")),
    *(f"/v1/{name}" for name in ("classify", "score", "rerank", "pooling")),
    *("/classify", "/score", "/rerank", "/v2/rerank", "/pooling"),
)
"""Paths that a line may ask."""
MAX_LINES = 50_000  # OpenAI's limit
MAX_ID = 512  # characters of a custom_id
MAX_PROBLEMS = 20  # wrong lines that are reported
FIELDS = {"custom_id", "method", "url", "body"}


def problem(code: str, message: str, line: int | None = None, param: str | None = None) -> dict[str, Any]:
    """What is wrong with a batch, as its errors list it. line: from 1."""
    return {"code": code, "line": line, "message": message, "param": param}


class BatchInvalidError(ConfigError):
    """Some lines are no requests."""

    def __init__(self, problems: list[dict[str, Any]]) -> None:
        super().__init__(f"line {problems[0]['line']}: {problems[0]['message']}")
        self.problems = problems


@dataclass(frozen=True)
class BatchLine:
    """Where a request is in its file, in bytes. digest: of the line, which names it in the answers' file."""

    custom_id: str
    url: str
    model: str
    offset: int
    size: int
    digest: str


def read_lines(path: Path, max_bytes: int, endpoint: str | None = None) -> list[BatchLine]:
    """The lines of a file that are not empty. endpoint: the path that all must ask; None: any of ENDPOINTS.

    Raises BatchInvalidError with the first MAX_PROBLEMS wrong lines.
    """
    found: list[BatchLine] = []
    seen: set[str] = set()
    problems: list[dict[str, Any]] = []
    for number, offset, raw in _raw_lines(path, max_bytes):
        if len(found) == MAX_LINES:
            problems.append(problem("too_many_lines", f"a batch may have {MAX_LINES} requests", number))
        elif len(raw) > max_bytes:
            reason = f"a line may have {max_bytes} bytes, as the body of a request (max_request_bytes)"
            problems.append(problem("request_too_large", reason, number))
        else:
            try:
                line = _parse(raw, offset, endpoint)
                if line.custom_id in seen:
                    reason = f"custom_id {line.custom_id[:80]!r} is there twice"
                    raise ApiError(400, "duplicate_custom_id", reason, "custom_id")
                seen.add(line.custom_id)
                found.append(line)
            except ApiError as error:
                problems.append(problem(error.code, error.message, number, error.param))
        if len(problems) == MAX_PROBLEMS or (len(found) == MAX_LINES and problems):
            break
    if not found and not problems:
        problems.append(problem("empty_file", "the file has no requests", 1))
    if problems:
        raise BatchInvalidError(problems)
    return found


def _raw_lines(path: Path, max_bytes: int) -> Iterator[tuple[int, int, bytes]]:
    """Number, offset and at most max_bytes + 1 bytes of each line that is not empty."""
    number = offset = 0
    with path.open("rb") as file:
        while raw := file.readline(max_bytes + 1):
            number += 1
            start, offset = offset, offset + len(raw)
            if raw.strip():
                yield number, start, raw.rstrip(b"\r\n") if raw.endswith(b"\n") else raw
            while not raw.endswith(b"\n") and (raw := file.readline(max_bytes)):
                offset += len(raw)


def _parse(raw: bytes, offset: int, endpoint: str | None) -> BatchLine:
    """Raises ApiError."""
    value = read_object(raw)
    if unknown := value.keys() - FIELDS:
        reason = f"{min(unknown)[:80]} is not a field of a line: {', '.join(sorted(FIELDS))}"
        raise _wrong(reason, min(unknown))
    custom_id, method, url = value.get("custom_id"), value.get("method", "POST"), value.get("url", endpoint)
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID:
        raise _wrong(f"custom_id must be a text of 1 to {MAX_ID} characters", "custom_id")
    if method != "POST":
        raise _wrong("method must be POST", "method")
    if url not in ENDPOINTS:
        raise _wrong(f"url must be one of {', '.join(ENDPOINTS)}", "url")
    if endpoint is not None and url != endpoint:
        raise _wrong(f"url must be {endpoint}, the batch's endpoint", "url")
    body = value.get("body")
    if not isinstance(body, dict):
        raise _wrong("body must be an object: the body of the request", "body")
    if body.get("stream"):
        raise _wrong("body.stream must be false: a batch is answered in a file", "body.stream")
    model = body.get("model")
    digest = hashlib.sha256(raw).hexdigest()
    return BatchLine(custom_id, url, model if isinstance(model, str) else "", offset, len(raw), digest)


def _wrong(message: str, param: str) -> ApiError:
    return ApiError(400, "invalid_line", message, param[:80])


LONGEST_WAIT_S = 30.0  # between two tries of a line that the server was too busy for
GONE = ("stopping", "engine_dead")  # codes of a server that answers nothing more


class ServerEndedError(Exception):
    """The server stops, or its engine died: the batch goes on at the next start."""


class NoRoomError(Exception):
    """The answers take more space than they may."""


@dataclass(frozen=True)
class Answer:
    """status: of HTTP. body: JSON. retry_s: how long the server asks to wait; 0: not at all."""

    status: int
    body: bytes
    request_id: str
    retry_s: float = 0.0


class AnswerFile:
    """The answers that a batch has so far, appended as they come. Survives the process.

    A line of it is the digest of the request's line, whether it succeeded, and the answer. The last one may
    be torn: then it is dropped, and its request is answered again. max_bytes: its size; 0: no limit.
    """

    def __init__(self, path: Path, max_bytes: int = 0) -> None:
        self.path, self._max_bytes = path, max_bytes
        self._places: dict[str, tuple[int, int, bool]] = {}  # digest -> offset, size, success
        self.completed = self.failed = 0
        self._file: BinaryIO = path.open("a+b")
        self._file.seek(0)
        end = 0
        for raw in self._file:
            with suppress(ValueError, KeyError, TypeError):
                found = json.loads(raw) if raw.endswith(b"\n") else {}
                self._place(found["digest"], end, len(raw), bool(found["ok"]))
                end += len(raw)
                continue
            break
        self._file.truncate(end)
        self._end = end

    def __contains__(self, line: BatchLine) -> bool:
        return line.digest in self._places

    def succeeded(self, line: BatchLine) -> bool:
        return line.digest in self._places and self._places[line.digest][2]

    def add(self, line: BatchLine, answer: dict[str, Any], *, ok: bool) -> None:
        """Raises NoRoomError, OSError."""
        raw = json.dumps({"digest": line.digest, "ok": ok, "answer": answer}, ensure_ascii=False).encode()
        if self._max_bytes and self._end + len(raw) > self._max_bytes:
            raise NoRoomError(f"its answers take more than the {self._max_bytes} bytes that they may take")
        self._file.write(raw + b"\n")
        self._file.flush()
        self._place(line.digest, self._end, len(raw) + 1, ok)
        self._end += len(raw) + 1

    def write(self, lines: Sequence[BatchLine], output: BinaryIO, *, ok: bool | None = None) -> None:
        """Write the answers in the order of their requests. ok: None: all of them."""
        for line in lines:
            offset, size, success = self._places.get(line.digest, (0, 0, False))
            if size and ok in (None, success):
                self._file.seek(offset)
                answer = json.loads(self._file.read(size))["answer"]
                output.write(json.dumps(answer, ensure_ascii=False).encode() + b"\n")
        output.flush()
        os.fsync(output.fileno())

    def close(self) -> None:
        self._file.close()

    def _place(self, digest: str, offset: int, size: int, ok: bool) -> None:
        self._places[digest] = offset, size, ok
        self.completed, self.failed = self.completed + ok, self.failed + (not ok)


async def answer_lines(
    app: ASGIApp,
    source: Path,
    lines: Sequence[BatchLine],
    answers: AnswerFile,
    slots: asyncio.Semaphore,
    at_once: int,
    state: dict[str, Any],
    answered: Callable[[], object] = lambda: None,
) -> None:
    """Answer the lines that `answers` lacks, those of one model one after another.

    slots: bounds the lines in work, of all batches. at_once: lines of this batch in work. state: goes into
    the scope of each request. answered: called after each line. Raises ServerEndedError, and NoRoomError or
    OSError if an answer cannot be kept.
    """
    left = iter(sorted((line for line in lines if line not in answers), key=lambda line: line.model))
    with source.open("rb") as file:

        async def work() -> None:
            for line in left:
                async with slots:
                    file.seek(line.offset)
                    asked = json.dumps(read_object(file.read(line.size))["body"]).encode()
                    wait_s = 1.0
                    while (answer := await ask(app, line.url, asked, state)).retry_s:  # busy is no failure
                        await asyncio.sleep(min(max(wait_s, answer.retry_s), LONGEST_WAIT_S))
                        wait_s *= 2
                body = json.loads(answer.body)
                told = {"status_code": answer.status, "request_id": answer.request_id, "body": body}
                answers.add(line, result(line, told), ok=answer.status == 200)
                answered()

        workers = [asyncio.create_task(work()) for _ in range(min(at_once, len(lines)))]
        try:
            await asyncio.gather(*workers)
        finally:
            for one in workers:
                one.cancel()
            await asyncio.gather(*workers, return_exceptions=True)


def result(line: BatchLine, response: Any = None, error: Any = None) -> dict[str, Any]:
    """The answer to a line. error: why it was never asked."""
    name = f"batch_req_{secrets.token_hex(12)}"
    return {"id": name, "custom_id": line.custom_id, "response": response, "error": error}


async def ask(app: ASGIApp, path: str, body: bytes, state: dict[str, Any]) -> Answer:
    """One POST request to an application in this process. Raises ServerEndedError."""
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        **state,
    }
    sent, left = False, asyncio.Event()
    status, headers, received = 500, dict[str, str](), bytearray()

    async def receive() -> Message:
        nonlocal sent
        if sent:
            await left.wait()  # the client stays until it is answered
            return {"type": "http.disconnect"}
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            headers.update((name.decode().lower(), value.decode()) for name, value in message["headers"])
        else:
            received.extend(message.get("body", b""))

    try:
        await app(scope, receive, send)
    finally:
        left.set()
    if status == 503 and json.loads(received)["error"]["code"] in GONE:
        raise ServerEndedError
    retry = headers.get("retry-after", "0")
    return Answer(status, bytes(received), headers.get("x-request-id", ""), float(retry))
