"""Tinker's API for sampling: sessions, samples as promises, and results as protocol buffers. No training."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from manylora.doors.http.api import logprobs
from manylora.doors.http.api.errors import (
    ApiError,
    as_api_error,
    invalid_value,
    queue_full,
    unsupported_field,
)
from manylora.doors.http.api.parsing import validate
from manylora.doors.http.api.schema import (
    MAX_TOKENS,
    AdapterFields,
    Body,
    CompletionRequest,
    Items,
    Text,
    TokenId,
    WordText,
)
from manylora.doors.http.serving.backend import Call
from manylora.doors.http.serving.inference import Inference
from manylora.doors.http.serving.keys import ApiKey
from manylora.doors.http.serving.usage import Names, report
from manylora.generation.generation import Generation
from manylora.generation.outputs import TokenLogprob

logger = logging.getLogger("manylora")

SCHEME, SAMPLER = "tinker://", "sampler:"
MAX_KEPT, MAX_KEPT_BYTES = 1024, 2**27  # samples that run or have ended; the oldest result goes first
WAIT_S = 20.0  # that a client waits for a result before it is told to ask again
MASKED = -99999.0  # log probability of an alternative that there is not
FIXED: dict[str, dict[str, Any]] = {
    "client/config": {"use_pyqwest_transport": False},
    "client/dynamic_config": {"sample_cancel_enabled": False},
    "session_heartbeat": {"type": "session_heartbeat"},
    "telemetry": {"status": "accepted"},
    "healthz": {"status": "ok"},
}
"""Answers that depend on nothing."""
TINKER_ROUTES = [
    ("POST", "/api/v1/asample", "tinker.asample"),
    ("POST", "/api/v1/retrieve_future", "tinker.retrieve_future"),
    ("POST", "/api/v1/create_sampling_session", "tinker.create_sampling_session"),
    ("GET", "/api/v1/healthz", "tinker.other"),
    ("GET", "/api/v1/get_server_capabilities", "tinker.other"),
    ("GET", "/api/v1/samplers/{name:path}", "tinker.other"),
    ("POST", "/api/v1/{name:path}", "tinker.other"),
]


class Chunk(Body):
    type: Literal["encoded_text"] = "encoded_text"
    tokens: Items[TokenId]


class ModelInput(Body):
    chunks: Annotated[Items[Chunk], Field(min_length=1, max_length=4096)]


class TinkerSampling(Body):
    """stop: null: the model's end tokens; []: nothing ends an output before max_tokens."""

    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: WordText | Annotated[Items[WordText] | Items[TokenId], Field(max_length=16)] | None = None
    temperature: float = Field(1.0, ge=0, le=100)
    top_k: int = Field(-1, ge=-1, le=MAX_TOKENS)
    top_p: float = Field(1.0, ge=0, le=1)


class ModelChoice(Body):
    base_model: Text | None = None
    model_path: Text | None = None


class SampleRequest(ModelChoice):
    type: Literal["sample"] = "sample"
    num_samples: int = Field(1, ge=1, le=128)
    prompt: ModelInput
    sampling_params: TinkerSampling
    sampling_session_id: Text | None = None
    seq_id: int | None = None
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = Field(0, ge=0, le=20)
    topk_sample_logprobs: int = Field(0, ge=0, le=20)
    prompt_logprobs_last_n: int | None = Field(None, ge=1, le=MAX_TOKENS)
    prompt_alt_tokens_k: Literal[0] = 0
    record_stability_info: Literal[False] = False


class SamplingSession(ModelChoice):
    type: Literal["create_sampling_session"] = "create_sampling_session"
    session_id: Text
    sampling_session_seq_id: int


class Promise(Body):
    request_id: Text
    allow_metadata_only: bool = False


class TinkerApi:
    """The methods raise ApiError. A sampling session is its model's name: nothing is stored for it. alone:
    False in a fleet, where another server may be asked for the result.
    """

    def __init__(self, inference: Inference, alone: bool) -> None:
        self._inference, self._alone = inference, alone
        # By request id, the oldest first: the key's name, and what `retrieve_future` answers.
        self._kept: dict[str, tuple[str, asyncio.Task[Response]]] = {}

    async def other(self, request: Request, key: ApiKey) -> Response:
        return JSONResponse(self._other(request.url.path.removeprefix("/api/v1/"), key))

    def _other(self, path: str, key: ApiKey) -> dict[str, Any]:
        bases = self._inference.bases
        if path in FIXED:
            return FIXED[path]
        if path == "create_session":
            return {"type": "create_session", "session_id": secrets.token_hex(16)}
        if path == "get_server_capabilities":
            known = {"max_context_length": self._inference.limits.max_seq_len, "trainable": False}
            return {"supported_models": [{"model_name": one, **known, "sampleable": True} for one in bases]}
        if path.startswith("samplers/"):
            session = path.removeprefix("samplers/")
            model = self._model(session.removeprefix(SAMPLER), key)
            found = {"sampler_id": session, "base_model": bases[0]}
            return found if model in bases else {**found, "model_path": SCHEME + model}
        if path.startswith("sessions/") and path.endswith("/finish"):
            return {}
        reason = "this server samples: train elsewhere, and load the adapter (PUT /v1/lora_adapters/NAME)"
        raise unsupported_field(f"{path[:100]} is not supported: {reason}")

    async def create_sampling_session(self, request: Request, body: SamplingSession, key: ApiKey) -> Response:
        model = self._model(body.model_path or body.base_model or "", key)
        return JSONResponse({"sampling_session_id": SAMPLER + model})

    async def asample(self, request: Request, body: SampleRequest, key: ApiKey) -> Response:
        """Begins. The answer has the id that `retrieve_future` takes."""
        if not self._alone:
            raise unsupported_field("asample is not supported in a fleet: use manylora serve")
        inference, given = self._inference, body.sampling_params
        with ExitStack() as stack:
            stack.enter_context(key.request())
            session = (body.sampling_session_id or "").removeprefix(SAMPLER)
            model = self._model(session or body.model_path or body.base_model or "", key)
            asked = await inference.ask(validate({"model": model}, AdapterFields), key)
            ids = tuple(token for chunk in body.prompt.chunks for token in chunk.tokens)
            stop: Sequence[Any] = [given.stop] if isinstance(given.stop, str) else given.stop or ()
            ends = asked.end_ids(inference.model) if given.stop != [] else []
            wanted = body.prompt_logprobs or body.topk_prompt_logprobs
            completion = {
                "model": model,
                "prompt": list(ids),
                "n": body.num_samples,
                "max_tokens": given.max_tokens or inference.room(len(ids)),
                **given.model_dump(include={"seed", "temperature", "top_k", "top_p"}),
                # As there: no defaults of the model's, and what ended an output is part of it.
                **{"min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": True},
                "include_stop_str_in_output": True,
                "stop": [one for one in stop if isinstance(one, str)],
                "stop_token_ids": [one for one in stop if isinstance(one, int)] + ends,
                "logprobs": body.topk_sample_logprobs,
                "prompt_logprobs": body.topk_prompt_logprobs if wanted else None,
            }
            call = inference.prepare(validate(completion, CompletionRequest), ids, asked)
            self._make_room(body.num_samples)
            run = self._run(call, body, stack.pop_all(), request, asked.names)
            name, task = secrets.token_hex(16), asyncio.create_task(run)
        self._kept[name] = key.name, task
        samples = [f"{name}:{number}" for number in range(body.num_samples)]
        return JSONResponse({"request_id": name, "sample_sequence_ids": samples})

    def _make_room(self, count: int) -> None:
        """Raises ApiError 429, after which clients wait."""
        self._inference.backend.queue.check_room(count)
        sizes = {name: len(task.result().body) for name, (_, task) in self._kept.items() if task.done()}
        left, total = len(self._kept), sum(sizes.values())
        for name, size in sizes.items():
            if left < MAX_KEPT and total <= MAX_KEPT_BYTES:
                break
            del self._kept[name]
            left, total = left - 1, total - size
        if left >= MAX_KEPT:
            raise queue_full()

    async def retrieve_future(self, request: Request, body: Promise, key: ApiKey) -> Response:
        owner, task = self._kept.get(body.request_id, ("", None))
        if task is None or owner != key.name:
            raise ApiError(410, "gone", "There is no result of this id any more: sample again")
        await asyncio.wait({task}, timeout=WAIT_S)
        if not task.done():
            again = {"type": "try_again", "request_id": body.request_id, "queue_state": "active"}
            return JSONResponse(again, 408)
        return task.result()

    async def _run(
        self,
        call: Call[Generation],
        body: SampleRequest,
        open_request: ExitStack,
        request: Request,
        names: Names,
    ) -> Response:
        with open_request:
            status = 499
            try:
                found = _message(await self._inference.finish(call), body)
                status = 200
                return Response(found, media_type="application/x-protobuf")
            except Exception as failure:
                error = as_api_error(failure)
                if error.code == "internal_error":
                    logger.exception("a sample failed")
                status = error.status
                category = "user" if status < 500 else "server"
                return JSONResponse({"error": error.message, "category": category})
            finally:
                report(self._inference.backend, [call], request, status, names)

    def _model(self, given: str, key: ApiKey) -> str:
        """The name that a path or a base model means."""
        name = given.removeprefix(SCHEME)
        if not name:
            raise invalid_value("model_path or base_model is required", "model_path")
        self._inference.choose_adapter(validate({"model": name}, AdapterFields), key)
        return name


def _message(generation: Generation, body: SampleRequest) -> bytes:
    """A SampleResponse as a protocol buffer."""
    found = []
    for output in generation.report():
        tokens = logprobs.output_logprobs(output, generation.alternatives(output.index))
        sequence = _field(1, int(output.finish_reason == "length"))
        sequence += _field(2, np.array([one.token_id for one in tokens], "<i4").tobytes())
        sequence += _field(3, np.array([one.logprob for one in tokens], "<f4").tobytes())
        found.append(_field(1, sequence + _top(4, tokens, body.topk_sample_logprobs)))
    if generation.context_logits is not None:
        top, last = body.topk_prompt_logprobs, body.prompt_logprobs_last_n
        known = logprobs.prompt_logprobs(generation.prompt, generation.context_logits, top)
        for at in range(0 if last is None else max(0, len(known) - last)):
            known[at] = TokenLogprob(known[at].token_id, None)
        if body.prompt_logprobs:
            values = [np.nan if one.logprob is None else one.logprob for one in known]
            found.append(_field(2, np.array(values, "<f4").tobytes()))
        found.append(_top(3, known, top))
    return b"".join(found)


def _top(number: int, tokens: Sequence[TokenLogprob], count: int) -> bytes:
    if not (count and tokens):
        return b""
    ids, values = np.zeros((len(tokens), count), "<i4"), np.full((len(tokens), count), MASKED, "<f4")
    for row, one in enumerate(tokens):
        if one.logprob is not None and one.top:
            ids[row, : len(one.top)], values[row, : len(one.top)] = zip(*one.top, strict=True)
    parts: tuple[int | bytes, ...] = ids.tobytes(), values.tobytes(), count, len(tokens)
    return _field(number, b"".join(_field(at, part) for at, part in enumerate(parts, 1)))


def _field(number: int, value: int | bytes) -> bytes:
    """Of a protocol buffer: a number, or bytes after their length."""
    numbers = [number << 3, value] if isinstance(value, int) else [number << 3 | 2, len(value)]
    found = bytearray()
    for one in numbers:
        while one > 127:
            found.append(one & 127 | 128)
            one >>= 7
        found.append(one)
    return bytes(found) if isinstance(value, int) else bytes(found) + value
