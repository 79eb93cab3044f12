"""/v1/embeddings, classify, score, rerank and pooling, as in OpenAI, vLLM, Jina and Cohere."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from manylora.config.pooling import PoolingSettings
from manylora.doors.http.api.errors import ApiError, context_length, invalid_value
from manylora.doors.http.api.params import check_priority
from manylora.doors.http.api.schema import (
    MAX_INPUTS,
    MAX_TOKENS,
    AdapterFields,
    Body,
    Items,
    RequestId,
    Text,
    TokenId,
)
from manylora.doors.http.serving.backend import Call
from manylora.doors.http.serving.inference import Inference, ResolvedRequest
from manylora.doors.http.serving.keys import ApiKey
from manylora.doors.http.serving.responses import RunningCalls
from manylora.doors.http.serving.transport import name_of
from manylora.generation import outputs
from manylora.generation.outputs import PooledGeneration, PoolingParams
from manylora.request import Pooling, RequestMetrics

Ids = Annotated[Items[TokenId], Field(min_length=1)]
Texts = Annotated[Items[str], Field(min_length=1, max_length=MAX_INPUTS)]
Inputs = str | Ids | Texts | Annotated[Items[Ids], Field(min_length=1, max_length=MAX_INPUTS)]


class PooledRequest(AdapterFields):
    """Fields of all pooled requests. truncate_prompt_tokens: use only the last N; -1: as many as fit.
    normalize, activation, softmax: vLLM's older names of use_activation.
    """

    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=MAX_TOKENS)
    add_special_tokens: bool = True
    truncation_side: Literal["left"] = "left"
    use_activation: bool = True
    normalize: bool | None = None
    activation: bool | None = None
    softmax: bool | None = None
    request_id: RequestId | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    priority: int = Field(0, ge=-(2**31), le=2**31 - 1)
    user: Text | None = None

    @model_validator(mode="after")
    def _one_name(self) -> PooledRequest:
        names = ("normalize", "activation", "softmax")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if "use_activation" in self.model_fields_set:
            given["use_activation"] = self.use_activation
        if len(set(given.values())) > 1:
            raise ValueError(f"{' and '.join(given)} mean the same: give one of them")
        for value in given.values():
            self.use_activation = value
        return self


class EmbeddingRequest(PooledRequest):
    """input: a text, token ids, or a list of either."""

    input: Inputs
    encoding_format: Literal["float", "base64"] = "float"
    embed_dtype: Literal["float32"] = "float32"
    endianness: Literal["native", "little"] = "little"
    dimensions: int | None = Field(None, ge=1, le=MAX_TOKENS)


class PoolingRequest(EmbeddingRequest):
    """task: None: labels or embeddings, depending on the adapter or model."""

    task: Literal["embed", "classify", "token_embed", "token_classify"] | None = None


class ClassifyRequest(PooledRequest):
    input: Inputs


class ScoreRequest(PooledRequest):
    """text_1: one text, or one for each text_2."""

    text_1: str | Texts
    text_2: str | Texts


class RerankDocument(Body):
    text: str


class RerankRequest(PooledRequest):
    """top_n: number of documents to return; 0: all."""

    query: str
    documents: Annotated[Items[str | RerankDocument], Field(min_length=1, max_length=MAX_INPUTS)]
    top_n: int = Field(0, ge=0, le=MAX_TOKENS)
    return_documents: bool = True
    max_tokens_per_doc: int | None = Field(None, ge=1, le=MAX_TOKENS)


Prompt = tuple[tuple[int, ...], Pooling]


@dataclass(frozen=True)
class Answered:
    """values: one for each prompt, as returned by the engine."""

    name: str  # suffix of the response's id
    model: str
    values: list[np.ndarray]
    num_tokens: int
    metrics: RequestMetrics | None = None  # of the last prompt

    @property
    def usage(self) -> dict[str, int]:
        return {"prompt_tokens": self.num_tokens, "total_tokens": self.num_tokens, "completion_tokens": 0}

    def listed(self, prefix: str, data: list[dict[str, Any]]) -> Response:
        found = {"id": f"{prefix}-{self.name}", "object": "list", "created": int(time.time())}
        return JSONResponse({**found, "model": self.model, "data": data, "usage": self.usage})


class PooledApi:
    """Its methods raise ApiError."""

    def __init__(self, inference: Inference, settings: PoolingSettings) -> None:
        self._inference, self._settings = inference, settings

    async def embeddings(self, request: Request, body: EmbeddingRequest, key: ApiKey) -> Response:
        done = await self.embed(request, body, key)
        data = [
            {"object": "embedding", "index": index, "embedding": _encoded(vector, body.encoding_format)}
            for index, vector in enumerate(done.values)
        ]
        return done.listed("embd", data)

    async def embed(self, request: Request, body: EmbeddingRequest, key: ApiKey) -> Answered:
        """The values are the embeddings."""
        self._check_dimensions(body)
        asked = await self._inference.ask(body, key)
        done = await self._pool(request, body, asked, body.input, Pooling(self._settings.mode))
        return replace(done, values=self._embeddings(done, body))

    async def classify(self, request: Request, body: ClassifyRequest, key: ApiKey) -> Response:
        asked = await self._inference.ask(body, key)
        pooling = outputs.pooling_of("classify", self._settings)
        done = await self._pool(request, body, asked, body.input, pooling)
        data = []
        for index, logits in enumerate(done.values):
            probs = outputs.probabilities(logits, self._settings, body.use_activation)
            label = self._settings.label_names(len(probs))[int(logits.argmax())]
            data.append({"index": index, "label": label, "probs": probs.tolist(), "num_classes": len(probs)})
        return done.listed("classify", data)

    async def pooling(self, request: Request, body: PoolingRequest, key: ApiKey) -> Response:
        asked = await self._inference.ask(body, key)
        task = body.task or ("classify" if await self._has_head(asked) else "embed")
        pooling = outputs.pooling_of(task, self._settings)
        if not pooling.head:
            self._check_dimensions(body)
        elif body.dimensions is not None:
            reason = f"dimensions only apply to embeddings: leave it out with task {task}"
            raise invalid_value(reason, "dimensions")
        done = await self._pool(request, body, asked, body.input, pooling)
        if pooling.head:
            found = [outputs.probabilities(one, self._settings, body.use_activation) for one in done.values]
        else:
            found = self._embeddings(done, body)
        data = [
            {"index": index, "object": "pooling", "data": _encoded(values, body.encoding_format)}
            for index, values in enumerate(found)
        ]
        return done.listed("pool", data)

    def _embeddings(self, done: Answered, body: EmbeddingRequest) -> list[np.ndarray]:
        params = PoolingParams(body.dimensions, body.use_activation)
        return [outputs.embedding(one, self._settings, params) for one in done.values]

    async def score(self, request: Request, body: ScoreRequest, key: ApiKey) -> Response:
        try:
            pairs = outputs.pair_up(body.text_1, body.text_2)
        except ValueError as error:
            raise invalid_value(str(error), "text_1") from error
        done, scores = await self._scores(request, body, key, pairs, "text_2")
        data = [{"index": index, "object": "score", "score": one} for index, one in enumerate(scores)]
        return done.listed("score", data)

    async def rerank(self, request: Request, body: RerankRequest, key: ApiKey) -> Response:
        if body.max_tokens_per_doc is not None:
            reason = "max_tokens_per_doc is not supported: give truncate_prompt_tokens, or shorter documents"
            raise invalid_value(reason, "max_tokens_per_doc")
        texts = [one if isinstance(one, str) else one.text for one in body.documents]
        pairs = [(body.query, text) for text in texts]
        done, scores = await self._scores(request, body, key, pairs, "documents")
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
        results: list[dict[str, Any]] = [{"index": i, "relevance_score": scores[i]} for i in order]
        if body.return_documents:
            results = [{**one, "document": {"text": texts[one["index"]]}} for one in results]
        found = {"id": f"rerank-{done.name}", "model": done.model, "usage": done.usage, "results": results}
        return JSONResponse(found)

    async def _scores(
        self, request: Request, body: PooledRequest, key: ApiKey, pairs: Sequence[tuple[str, str]], field: str
    ) -> tuple[Answered, list[float]]:
        """From a head that reads both texts if there is one. Otherwise the cosine of their embeddings."""
        params = PoolingParams(use_activation=body.use_activation)
        asked = await self._inference.ask(body, key)
        if await self._has_head(asked, most=1):
            self._inference.backend.queue.check_room(len(pairs))
            joined = [await asked.prompts.encode_pair(*pair, field) for pair in pairs]
            prompts = [
                self._cut(ids, body, Pooling(self._settings.head_mode, True, first), field)
                for ids, first in joined
            ]
            done = await self._run(request, body, prompts, asked)
            try:
                return done, [outputs.pair_score(values, self._settings, params) for values in done.values]
            except ValueError as error:
                raise invalid_value(str(error), "model") from error
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))  # embed a repeated query once
        done = await self._pool(request, body, asked, texts, Pooling(self._settings.mode), field)
        by_text = {
            text: outputs.embedding(values, self._settings, PoolingParams())
            for text, values in zip(texts, done.values, strict=True)
        }
        return done, [outputs.similarity(by_text[a], by_text[b]) for a, b in pairs]

    async def _has_head(self, asked: ResolvedRequest, most: int = 2**31) -> bool:
        """Whether the adapter has a classification head, or the model one of at most `most` labels."""
        choice, catalog = asked.choice, self._inference.backend.catalog
        if choice.alone is not None and (await catalog.version(choice.alone)).facts.labels:
            return True
        return 0 < self._inference.model.num_labels <= most

    async def _pool(
        self,
        request: Request,
        body: PooledRequest,
        asked: ResolvedRequest,
        given: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        pooling: Pooling,
        field: str = "input",
    ) -> Answered:
        """given: what the field has."""
        single = isinstance(given, str) or isinstance(given[0], int)
        # Before thousands are tokenised.
        self._inference.backend.queue.check_room(1 if single else len(given))
        found = []
        for one in [given] if single else given:
            if isinstance(one, str):
                whole = body.truncate_prompt_tokens is None
                ids = await asked.prompts.encode(one, body.add_special_tokens, field, whole)
            else:
                ids = tuple(one)  # type: ignore[arg-type]
            found.append(self._cut(ids, body, pooling, field))
        return await self._run(request, body, found, asked)

    def _cut(self, ids: Sequence[int], body: PooledRequest, pooling: Pooling, field: str) -> Prompt:
        limits, cut = self._inference.limits, body.truncate_prompt_tokens
        if cut is not None:
            ids = ids[-(limits.max_seq_len if cut == -1 else max(1, cut)) :]
        if not ids:
            raise invalid_value(f"{field}: must have at least one token", field)
        if max(ids) >= limits.vocab_size:
            raise invalid_value(f"{field}: token ids must be at most {limits.vocab_size - 1}", field)
        if len(ids) > limits.max_seq_len:
            reason = f"{context_length(limits.max_seq_len)}. {field} has {len(ids)} tokens"
            raise ApiError(400, "context_length_exceeded", reason, field)
        return tuple(ids), pooling

    def _check_dimensions(self, body: EmbeddingRequest) -> None:
        if body.dimensions is not None:
            try:
                outputs.check_dimensions(body.dimensions, self._settings)
            except ValueError as error:
                raise invalid_value(str(error), "dimensions") from error

    async def _run(
        self, request: Request, body: PooledRequest, prompts: Sequence[Prompt], asked: ResolvedRequest
    ) -> Answered:
        check_priority(body.priority, self._inference.limits)
        self._inference.count_shared(asked.choice)
        changed, name = asyncio.Event(), name_of(request, body.request_id)
        calls = [
            Call(
                PooledGeneration(ids, pooling, f"{name}-{number}", body.cache_salt or ""),
                changed,
                asked.choice,
                body.load_lora_weights,
                priority=body.priority,
            )
            for number, (ids, pooling) in enumerate(prompts)
        ]
        backend = self._inference.backend
        with closing(RunningCalls(backend, calls, request, asked.names)) as run:
            await run.begin()
            await run.finish()
        values = [call.generation.values for call in calls]
        count = sum(len(ids) for ids, _ in prompts)
        metrics = calls[-1].generation.metrics
        return Answered(name, asked.names.model, [one for one in values if one is not None], count, metrics)


def _encoded(values: np.ndarray, encoding: str) -> Any:
    """A list, or base64 of little-endian float32."""
    if encoding == "float":
        return values.tolist()
    return base64.b64encode(np.ascontiguousarray(values, "<f4").tobytes()).decode()
