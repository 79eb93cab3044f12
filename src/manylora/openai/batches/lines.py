"""The requests of a batch, one JSON object per line, as in OpenAI's Batch API and vLLM's run-batch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manylora.errors import ConfigError
from manylora.openai.api.errors import ApiError
from manylora.openai.api.parsing import read_object

ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/classify",
    "/v1/score",
    "/v1/rerank",
    "/v1/pooling",
    "/classify",
    "/score",
    "/rerank",
    "/v2/rerank",
    "/pooling",
)
"""Paths that a line may ask."""
MAX_LINES = 50_000  # OpenAI's limit
MAX_ID = 512  # characters of a custom_id
MAX_PROBLEMS = 20  # wrong lines that are reported
FIELDS = {"custom_id", "method", "url", "body"}


@dataclass(frozen=True)
class LineProblem:
    """What is wrong with a line. number: from 1."""

    number: int
    code: str
    message: str
    param: str | None = None


class BatchInvalidError(ConfigError):
    """Some lines are no requests."""

    def __init__(self, problems: list[LineProblem]) -> None:
        first = problems[0]
        super().__init__(f"line {first.number}: {first.message}")
        self.problems = problems


@dataclass(frozen=True)
class BatchLine:
    """Where a request is in its file.

    model: as in its body. offset, size: in bytes. digest: of the line, which names it in the answers' file.
    """

    custom_id: str
    url: str
    model: str
    offset: int
    size: int
    digest: str


def read_lines(path: Path, max_bytes: int, endpoint: str | None = None) -> list[BatchLine]:
    """The lines of a file, in their order. Empty ones are passed by.

    max_bytes: of one line. endpoint: the path that all must ask; None: any of ENDPOINTS. Raises
    BatchInvalidError with the first MAX_PROBLEMS wrong lines.
    """
    found: list[BatchLine] = []
    seen: set[str] = set()
    problems: list[LineProblem] = []
    for number, offset, raw in _raw_lines(path, max_bytes):
        if len(found) == MAX_LINES:
            problems.append(LineProblem(number, "too_many_lines", f"a batch may have {MAX_LINES} requests"))
        elif len(raw) > max_bytes:
            reason = f"a line may have {max_bytes} bytes, as the body of a request (max_request_bytes)"
            problems.append(LineProblem(number, "request_too_large", reason))
        else:
            try:
                line = _parse(raw, offset, endpoint)
                if line.custom_id in seen:
                    reason = f"custom_id {line.custom_id[:80]!r} is there twice"
                    raise ApiError(400, "duplicate_custom_id", reason, "custom_id")
                seen.add(line.custom_id)
                found.append(line)
            except ApiError as error:
                problems.append(LineProblem(number, error.code, error.message, error.param))
        if len(problems) == MAX_PROBLEMS or (len(found) == MAX_LINES and problems):
            break
    if not found and not problems:
        problems.append(LineProblem(1, "empty_file", "the file has no requests"))
    if problems:
        raise BatchInvalidError(problems)
    return found


def read_body(file: Any, line: BatchLine) -> dict[str, Any]:
    """The body of a line. file: open in binary mode."""
    file.seek(line.offset)
    body: dict[str, Any] = read_object(file.read(line.size))["body"]
    return body


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
        raise _wrong(
            f"{min(unknown)[:80]} is not a field of a line: {', '.join(sorted(FIELDS))}", min(unknown)
        )
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
