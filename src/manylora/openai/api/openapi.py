"""The OpenAPI document, from the pydantic models of the bodies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from manylora.openai.api import pooled_request, schema
from manylora.openai.api.anthropic_request import CountTokensRequest, MessagesRequest
from manylora.openai.api.ollama_request import (
    OllamaChat,
    OllamaEmbed,
    OllamaEmbeddings,
    OllamaGenerate,
    OllamaShow,
)
from manylora.openai.api.responses_request import ResponsesRequest
from manylora.version import __version__

BODIES: dict[str, type[BaseModel]] = {
    "completions": schema.CompletionRequest,
    "chat": schema.ChatRequest,
    "responses": ResponsesRequest,
    "other.messages": MessagesRequest,
    "other.count_tokens": CountTokensRequest,
    "other.ollama_chat": OllamaChat,
    "other.ollama_generate": OllamaGenerate,
    "other.ollama_embed": OllamaEmbed,
    "other.ollama_embeddings": OllamaEmbeddings,
    "other.ollama_show": OllamaShow,
    "adapters.load": schema.LoadRequest,
    "adapters.unload": schema.UnloadRequest,
    "adapters.pin": schema.PinRequest,
    "other.embeddings": pooled_request.EmbeddingRequest,
    "other.classify": pooled_request.ClassifyRequest,
    "other.score": pooled_request.ScoreRequest,
    "other.rerank": pooled_request.RerankRequest,
    "other.pooling": pooled_request.PoolingRequest,
    "batches.create": schema.BatchRequest,
    "tokenize": schema.TokenizeRequest,
    "detokenize": schema.DetokenizeRequest,
}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}


def document(routes: Sequence[tuple[str, str, str]]) -> dict[str, Any]:
    """routes: method, path, name of the handler."""
    reference = "#/components/schemas/{model}"
    _, schemas = models_json_schema([(m, "validation") for m in BODIES.values()], ref_template=reference)
    paths: dict[str, dict[str, Any]] = {}
    for method, path, name in routes:
        path = path.replace(":path}", "}")
        paths.setdefault(path, {})[method.lower()] = _operation(name, path)
        if method == "DELETE":
            operation = paths[path]["delete"]
            operation["operationId"] = f"delete_{operation['operationId']}"
    return {
        "openapi": "3.1.0",
        "info": {"title": "manylora", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**schemas["$defs"], "Error": ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(name: str, path: str) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    found: dict[str, Any] = {
        "operationId": path.strip("/").replace("/", "_").replace("{", "").replace("}", "") or "page",
        "responses": {"200": {"description": "OK"}, "default": {"description": "Error", "content": error}},
    }
    if "{name}" in path:
        found["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    if name in BODIES:
        reference = {"$ref": f"#/components/schemas/{BODIES[name].__name__}"}
        content: dict[str, Any] = {"application/json": {"schema": reference}}
        if name == "adapters.load":  # the body may be the adapter's file
            content["application/octet-stream"] = {"schema": {"type": "string", "format": "binary"}}
            kinds = {
                "lora_name": "string",
                "adapter_config": "string",
                "owner": "string",
                "idle_ttl_seconds": "number",
            }
            kinds |= dict.fromkeys(("load_inplace", "pinned", "public"), "boolean")
            found["parameters"] = [
                {"name": one, "in": "query", "schema": {"type": kind}} for one, kind in kinds.items()
            ]
        found["requestBody"] = {"required": True, "content": content}
    if name == "batches.upload":
        form = {
            "type": "object",
            "required": ["file", "purpose"],
            "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"const": "batch"}},
        }
        found["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": form}}}
    if name == "adapters.put":
        binary = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
        found["requestBody"] = {"required": True, "content": binary}
        found["parameters"].append({"name": "adapter_config", "in": "query", "schema": {"type": "string"}})
    return found
