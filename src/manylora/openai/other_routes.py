"""Routes besides OpenAI's generation: Anthropic's, Ollama's, and those for pooled outputs."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from manylora.config.pooling import PoolingSettings
from manylora.openai.api.anthropic_request import CountTokensRequest, MessagesRequest
from manylora.openai.api.errors import ApiError, as_api_error, client_left, renamed
from manylora.openai.api.ollama_request import (
    NAMES,
    OllamaChat,
    OllamaEmbed,
    OllamaEmbeddings,
    OllamaGenerate,
    OllamaShow,
)
from manylora.openai.api.pooled_request import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from manylora.openai.serving.anthropic_api import answer_messages, count_tokens, error_body
from manylora.openai.serving.inference import Inference
from manylora.openai.serving.keys import ApiKey
from manylora.openai.serving.ollama_api import VERSION, OllamaApi, OllamaEmbeddingApi
from manylora.openai.serving.pooled_api import PooledApi
from manylora.openai.serving.transport import error_response, request_id

logger = logging.getLogger("manylora")

OLLAMA, ANTHROPIC = "/api/", "/v1/messages"
OTHER_ROUTES = [
    ("POST", "/v1/messages", "other.messages"),
    ("POST", "/v1/messages/count_tokens", "other.count_tokens"),
    ("POST", "/api/chat", "other.ollama_chat"),
    ("POST", "/api/generate", "other.ollama_generate"),
    ("POST", "/api/embed", "other.ollama_embed"),
    ("POST", "/api/embeddings", "other.ollama_embeddings"),
    ("POST", "/api/show", "other.ollama_show"),
    ("GET", "/api/tags", "other.ollama_tags"),
    ("GET", "/api/ps", "other.ollama_running"),
    ("GET", "/api/version", "other.ollama_version"),
    ("POST", "/v1/embeddings", "other.embeddings"),
    ("POST", "/v1/classify", "other.classify"),
    ("POST", "/classify", "other.classify"),
    ("POST", "/v1/score", "other.score"),
    ("POST", "/score", "other.score"),
    ("POST", "/v1/rerank", "other.rerank"),
    ("POST", "/v2/rerank", "other.rerank"),
    ("POST", "/rerank", "other.rerank"),
    ("POST", "/v1/pooling", "other.pooling"),
    ("POST", "/pooling", "other.pooling"),
]
"""HTTP method, path, method of OtherRoutes."""


class OtherRoutes:
    """identify: returns the API key of a request. read: parses its body. folder: of the base model."""

    def __init__(
        self,
        identify: Callable[[Request], ApiKey],
        read: Callable[..., Awaitable[Any]],
        inference: Inference,
        created: int,
        pooling: PoolingSettings,
        folder: Path,
    ) -> None:
        self._identify, self._read, self._inference = identify, read, inference
        self._ollama = OllamaApi(inference, created, folder)
        self._pooled = PooledApi(inference, pooling)
        self._ollama_embedding = OllamaEmbeddingApi(inference, self._ollama, self._pooled)

    async def messages(self, request: Request) -> Response:
        key = self._identify(request)
        return await answer_messages(
            self._inference, request, await self._read(request, MessagesRequest), key
        )

    async def count_tokens(self, request: Request) -> Response:
        key = self._identify(request)
        body = await self._read(request, CountTokensRequest)
        return JSONResponse(await count_tokens(self._inference, body, key))

    async def ollama_chat(self, request: Request) -> Response:
        key = self._identify(request)
        return await self._ollama.chat(request, await self._read(request, OllamaChat, any_type=True), key)

    async def ollama_generate(self, request: Request) -> Response:
        key = self._identify(request)
        body = await self._read(request, OllamaGenerate, any_type=True)
        return await self._ollama.generate(request, body, key)

    async def ollama_embed(self, request: Request) -> Response:
        key = self._identify(request)
        body = await self._read(request, OllamaEmbed, any_type=True)
        return JSONResponse(await self._ollama_embedding.embed(request, body, key))

    async def ollama_embeddings(self, request: Request) -> Response:
        key = self._identify(request)
        body = await self._read(request, OllamaEmbeddings, any_type=True)
        return JSONResponse(await self._ollama_embedding.embeddings(request, body, key))

    async def ollama_show(self, request: Request) -> Response:
        key = self._identify(request)
        body = await self._read(request, OllamaShow, any_type=True)
        return JSONResponse(await self._ollama.show(body, key))

    async def ollama_tags(self, request: Request) -> Response:
        return JSONResponse(await self._ollama.tags(self._identify(request)))

    async def ollama_running(self, request: Request) -> Response:
        return JSONResponse(await self._ollama.running(self._identify(request)))

    async def ollama_version(self, request: Request) -> Response:
        return JSONResponse({"version": VERSION})

    async def embeddings(self, request: Request) -> Response:
        key = self._identify(request)
        return await self._pooled.embeddings(request, await self._read(request, EmbeddingRequest), key)

    async def classify(self, request: Request) -> Response:
        key = self._identify(request)
        return await self._pooled.classify(request, await self._read(request, ClassifyRequest), key)

    async def score(self, request: Request) -> Response:
        key = self._identify(request)
        return await self._pooled.score(request, await self._read(request, ScoreRequest), key)

    async def rerank(self, request: Request) -> Response:
        key = self._identify(request)
        return await self._pooled.rerank(request, await self._read(request, RerankRequest), key)

    async def pooling(self, request: Request) -> Response:
        key = self._identify(request)
        return await self._pooled.pooling(request, await self._read(request, PoolingRequest), key)


def failed(request: Request, path: str, error: Exception) -> Response:
    """The response to a request whose handler raised this error. Unexpected ones are logged."""
    if isinstance(error, ClientDisconnect):  # it left while sending the body: nobody reads this response
        return error_at(request, path, client_left())
    found = as_api_error(error)
    if found.code == "internal_error":
        logger.error("%s failed, request %s", path, request_id(request), exc_info=error)
    return error_at(request, path, found)


def error_at(request: Request, path: str, error: ApiError) -> Response:
    """An error in the format of the API that the path belongs to."""
    if path.startswith(ANTHROPIC):
        body = error_body(error) | {"request_id": request_id(request)}
        return JSONResponse(body, error.status, headers=error.headers)
    if not path.startswith(OLLAMA):
        return error_response(error)
    error = renamed(error, NAMES)
    if error.code == "not_found":
        served = ", ".join(route for _, route, _ in OTHER_ROUTES if route.startswith(OLLAMA))
        error = ApiError(404, error.code, f"{path[:100]} is not served: there are {served}")
    return JSONResponse({"error": error.message}, error.status, headers=error.headers)
