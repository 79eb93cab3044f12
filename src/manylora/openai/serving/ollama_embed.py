"""Ollama's embeddings: /api/embed, and its predecessor /api/embeddings."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from starlette.requests import Request

from manylora.openai.api.ollama_request import OllamaEmbed, OllamaEmbeddings
from manylora.openai.api.parsing import validate
from manylora.openai.api.pooled_request import EmbeddingRequest
from manylora.openai.serving.inference import Inference
from manylora.openai.serving.keys import ApiKey
from manylora.openai.serving.ollama_api import OllamaApi, durations
from manylora.openai.serving.pooled_api import PooledApi
from manylora.openai.serving.prompts import Prompts


class OllamaEmbeddingApi:
    """Its methods raise ApiError."""

    def __init__(self, inference: Inference, ollama: OllamaApi, pooled: PooledApi) -> None:
        self._inference, self._ollama, self._pooled = inference, ollama, pooled

    async def embed(self, request: Request, body: OllamaEmbed, key: ApiKey) -> dict[str, Any]:
        """Embeddings normalised to length 1, whatever the model's folder says, as in Ollama."""
        started, model = time.monotonic_ns(), self._ollama.meant(body.model)
        self._ollama.check(model, key)
        if not body.texts:  # clients do this to load a model
            return {"model": body.model, "embeddings": []}
        prompts = await self._inference.prompts_of(model, key)
        ids = [await self._ids(prompts, text, "input", body.truncate) for text in body.texts]
        wanted = {"model": model, "input": ids, "dimensions": body.dimensions}
        done = await self._pooled.embed(request, validate(wanted, EmbeddingRequest), key)
        return {
            "model": body.model,
            "embeddings": [_unit(one).tolist() for one in done.values],
            "total_duration": time.monotonic_ns() - started,
            "load_duration": durations(done.metrics)[0],
            "prompt_eval_count": done.num_tokens,
        }

    async def embeddings(self, request: Request, body: OllamaEmbeddings, key: ApiKey) -> dict[str, Any]:
        """What the model returns, of any length, as in Ollama."""
        model = self._ollama.meant(body.model)
        self._ollama.check(model, key)
        if not body.prompt:
            return {"embedding": []}
        prompts = await self._inference.prompts_of(model, key)
        ids = await self._ids(prompts, body.prompt, "prompt", True)
        wanted = {"model": model, "input": [ids], "use_activation": False}
        done = await self._pooled.embed(request, validate(wanted, EmbeddingRequest), key)
        return {"embedding": done.values[0].tolist()}

    async def _ids(self, prompts: Prompts, text: str, field: str, truncate: bool) -> Sequence[int]:
        """The start of a text that is too long, and the tokens that follow any text."""
        ids = await prompts.encode(text, True, field, whole=not truncate)
        most = self._inference.limits.max_seq_len
        if not truncate or len(ids) <= most:
            return list(ids)
        added = prompts.tokenizer.encode("")
        before = next((at for at, one in enumerate(added) if one != ids[at]), len(added))
        behind = added[before:]
        return [*ids[: most - len(behind)], *behind]


def _unit(values: np.ndarray) -> np.ndarray:
    return values / max(float(np.linalg.norm(values)), 1e-12)
