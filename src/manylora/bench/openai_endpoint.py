"""OpenAiTarget: a running server with OpenAI's completions API."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from manylora.bench.datasets import BenchRequest
from manylora.bench.load import Answer
from manylora.bench.remote import ANSWER_TIMEOUT_S, RemoteTarget
from manylora.errors import ConfigError, RequestError

FIELDS = ("temperature", "top_k", "top_p", "seed")
MAX_ERROR = 300


class OpenAiTarget(RemoteTarget):
    """POST <url>/v1/completions. The adapter is sent as `lora_request`, with its absolute path.

    sampling: fields of SamplingParams; end_id -1 becomes `ignore_eos`. The number of output tokens comes from
    the server's `usage`. Raises ConfigError for a field that cannot be sent, and if the server does not
    answer.
    """

    def __init__(self, url: str, connections: int, *, streaming: bool, sampling: dict[str, Any]) -> None:
        super().__init__(connections)
        parts = urlsplit(url)
        if not parts.hostname:
            raise ConfigError(f"--endpoint {url} names no host; wanted is http://HOST:PORT")
        self._host, self._port, self._secure = parts.hostname, parts.port, parts.scheme == "https"
        self._prefix = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._streaming, self._fields = streaming, _fields(sampling)
        self._model = self._first_model(url)

    def _first_model(self, url: str) -> str:
        client = self._connect()
        try:
            client.request("GET", f"{self._prefix}/models")
            response = client.getresponse()
            body = response.read()
            if response.status == 200:
                return str(json.loads(body)["data"][0]["id"])
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError(f"--endpoint {url} does not answer: {error}") from error
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ConfigError(f"--endpoint {url}: {self._prefix}/models names no model") from error
        finally:
            client.close()
        raise ConfigError(f"--endpoint {url}: {self._prefix}/models answers {_reason(response.status, body)}")

    def _ask(self, request: BenchRequest) -> Answer:
        client: http.client.HTTPConnection = self._connection()
        try:
            body = json.dumps(self._body(request), ensure_ascii=False).encode()
            headers = {"Content-Type": "application/json"}
            client.request("POST", f"{self._prefix}/completions", body, headers)
            response = client.getresponse()
            if response.status != 200:
                raise RequestError(_reason(response.status, response.read()))
            return _streamed(response) if self._streaming else _whole(response)
        except (OSError, http.client.HTTPException) as error:
            client.close()  # the next request opens it again
            raise RequestError(f"the server broke off: {error or type(error).__name__}") from error
        except BaseException:
            client.close()
            raise

    def _body(self, request: BenchRequest) -> dict[str, Any]:
        ids = request.input_ids
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": request.prompt if ids is None else list(ids),
            "max_tokens": request.output_tokens,
            **self._fields,
        }
        if self._streaming:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        lora = request.lora
        if lora is not None:
            assert lora.lora_path is not None
            body["lora_request"] = {
                "lora_name": lora.lora_name,
                "lora_int_id": lora.lora_int_id,
                "lora_path": str(Path(lora.lora_path).absolute()),
            }
        return body

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=ANSWER_TIMEOUT_S)


def _fields(sampling: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in sampling.items():
        if name == "end_id" and value == -1:
            found["ignore_eos"] = True
        elif name in FIELDS:
            found[name] = value
        else:
            raise ConfigError(
                f"{'--eos_id' if name == 'end_id' else f'--sampler_options: {name}'} is not sent to an "
                "OpenAI server; leave it out"
            )
    # The API samples by default; a benchmark should be repeatable.
    return {"temperature": 0.0, **found}


def _whole(response: http.client.HTTPResponse) -> Answer:
    body = _parse(response.read())
    return _answer(body.get("usage"), None, "".join(_texts(body)))


def _streamed(response: http.client.HTTPResponse) -> Answer:
    first, usage, texts = None, None, []
    for event in _events(response):
        if "error" in event:
            raise RequestError(_message(event["error"]))
        usage = event.get("usage") or usage
        pieces = _texts(event)
        if first is None and any(pieces):
            first = time.monotonic()
        texts += pieces
    return _answer(usage, first, "".join(texts))


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The objects of a stream of server-sent events. Raises RequestError if it ends without [DONE]."""
    for line in response:
        data = line.strip().removeprefix(b"data:").strip()
        if not line.startswith(b"data:"):
            continue
        if data == b"[DONE]":
            response.read()  # read to the end, so that the connection can be reused
            return
        yield _parse(data)
    raise RequestError("the server ended the stream without [DONE]")


def _texts(body: dict[str, Any]) -> list[str]:
    return [choice.get("text") or "" for choice in body.get("choices") or ()]


def _answer(usage: Any, first: float | None, text: str) -> Answer:
    if not isinstance(usage, dict):
        raise RequestError("the server tells no usage, so the tokens of its answer are not known")
    return Answer(first, usage["prompt_tokens"], usage["completion_tokens"], text=text)


def _parse(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError as error:
        raise RequestError("the server's answer is not JSON") from error
    if not isinstance(value, dict):
        raise RequestError("the server's answer is not a JSON object")
    return value


def _reason(status: int, body: bytes) -> str:
    try:
        text = _message(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        text = body.decode("utf-8", "replace")
    return f"HTTP {status}: {text[:MAX_ERROR]}"


def _message(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)
