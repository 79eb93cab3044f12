"""Ollama's API: chats, completions and embeddings in Ollama's format."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Container, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from manylora.adapters.catalog.entry import AdapterEntry
from manylora.adapters.catalog.names import LATEST
from manylora.doors.http.api import ollama_request as bodies
from manylora.doors.http.api import schema
from manylora.doors.http.api.errors import ApiError, renamed
from manylora.doors.http.api.parsing import validate
from manylora.doors.http.serving.inference import Inference
from manylora.doors.http.serving.keys import ApiKey
from manylora.doors.http.serving.models import ModelFiles, tiers
from manylora.doors.http.serving.pooled import EmbeddingRequest, PooledApi
from manylora.doors.http.serving.prompts import Prompts
from manylora.doors.http.serving.responses import Answers, TranslatedChat, encode
from manylora.generation.reply_formats import thinking_of
from manylora.generation.tokenizer import Tokenizer
from manylora.request import RequestMetrics

VERSION = "0.12.11"  # of the API; clients require a minimum version
DONE = {"length": "length"}  # finish reason of a chat -> done_reason; others: stop
EMPTY = {"role": "assistant", "content": ""}
NEVER = "2318-01-01T00:00:00Z"  # when a model will be unloaded


class OllamaApi:
    """created: Unix time shown for the base model. folder: its files. The methods raise ApiError."""

    def __init__(self, inference: Inference, pooled: PooledApi, created: int, folder: Path) -> None:
        self._inference, self._pooled, self._created, self._folder = inference, pooled, created, folder
        self._files = ModelFiles()
        self._catalog = inference.backend.catalog

    async def chat(self, request: Request, body: bodies.OllamaChat, key: ApiKey) -> Response:
        model = self.meant(body.model)
        if not body.messages:
            return self._loaded(body, model, key)
        return await self._answer(request, body, bodies.chat_request(body, model), key)

    async def generate(self, request: Request, body: bodies.OllamaGenerate, key: ApiKey) -> Response:
        model = self.meant(body.model)
        if not body.prompt and not body.system:
            return self._loaded(body, model, key)
        prompts = await self._inference.prompts_of(model, key)
        if not body.raw and prompts.tokenizer.chat_template is not None:
            return await self._answer(request, body, bodies.chat_request(body, model), key)
        started, completion = time.monotonic_ns(), bodies.completion_request(body, model)
        asked = await self._inference.ask(completion, key)
        ids = await asked.prompts.tokenize(schema.TokenizeRequest.model_validate({"prompt": body.prompt}))
        most = self._inference.limits.max_seq_len - 1 if body.truncate else len(ids)
        completion.prompt, completion.truncate_prompt_tokens = ids, max(1, most)
        room = self._inference.room(min(len(ids), most))
        completion.max_tokens = room if completion.max_tokens is None else min(completion.max_tokens, room)
        build = partial(OllamaAnswer, body, started)
        return await self._inference.complete(request, completion, key, build, asked)

    async def embed(self, request: Request, body: bodies.OllamaEmbed, key: ApiKey) -> Response:
        """Embeddings normalised to length 1, whatever the model's folder says, as in Ollama."""
        started, model = time.monotonic_ns(), self.meant(body.model)
        self.check(model, key)
        if not body.texts:  # clients do this to load a model
            return JSONResponse({"model": body.model, "embeddings": []})
        prompts = await self._inference.prompts_of(model, key)
        ids = [await self._ids(prompts, text, "input", body.truncate) for text in body.texts]
        wanted = {"model": model, "input": ids, "dimensions": body.dimensions}
        done = await self._pooled.embed(request, validate(wanted, EmbeddingRequest), key)
        unit = [one / max(float(np.linalg.norm(one)), 1e-12) for one in done.values]
        shown = {
            "model": body.model,
            "embeddings": [one.tolist() for one in unit],
            "total_duration": time.monotonic_ns() - started,
            "load_duration": durations(done.metrics)[0],
            "prompt_eval_count": done.num_tokens,
        }
        return JSONResponse(shown)

    async def embeddings(self, request: Request, body: bodies.OllamaEmbeddings, key: ApiKey) -> Response:
        """What the model returns, of any length, as in Ollama."""
        model = self.meant(body.model)
        self.check(model, key)
        if not body.prompt:
            return JSONResponse({"embedding": []})
        prompts = await self._inference.prompts_of(model, key)
        ids = await self._ids(prompts, body.prompt, "prompt", True)
        wanted = {"model": model, "input": [ids], "use_activation": False}
        done = await self._pooled.embed(request, validate(wanted, EmbeddingRequest), key)
        return JSONResponse({"embedding": done.values[0].tolist()})

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

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": VERSION})

    async def tags(self, request: Request, key: ApiKey) -> Response:
        """The models that a key may see."""
        return JSONResponse({"models": await self._seen(key)})

    async def running(self, request: Request, key: ApiKey) -> Response:
        """The base model, and the adapters in the cache."""
        tier_of = tiers(self._inference.backend.stats())
        found = await self._seen(key, tier_of)
        where = {"expires_at": NEVER, "context_length": self._inference.limits.max_seq_len}
        for card in found:
            on_device = tier_of.get(self.meant(card["model"])) == "device"
            card |= where | {"size_vram": card["size"] if on_device else 0}
        return JSONResponse({"models": found})

    async def show(self, request: Request, body: bodies.OllamaShow, key: ApiKey) -> Response:
        given = body.model or body.name
        if not given:
            raise ApiError(400, "missing_field", "model is required", "model")
        name = self.meant(given)
        self.check(name, key)
        await self._read_files()
        entry = next((one for one in self._catalog.entries() if one.name == name), None)
        card = self._card(entry)
        limits, files = self._inference.limits, self._files
        prompts, defaults = await self._inference.text_of(name, key)
        able = ["completion", *["tools"] * (prompts.tokenizer.chat_template is not None)]
        able += ["thinking"] * self._thinks(prompts.tokenizer)
        family = card["details"]["family"]
        facts = {
            "general.architecture": family,
            f"{family}.context_length": limits.max_seq_len,
            f"{family}.vocab_size": limits.vocab_size,
            f"{family}.embedding_length": self._inference.model.hidden_size,
            f"{family}.block_count": self._inference.model.num_layers,
            **({"general.parameter_count": files.parameters} if files.parameters else {}),
            **({} if files.file_type is None else {"general.file_type": files.file_type}),
        }
        shown = {
            "modelfile": f"FROM {given}\n",
            "parameters": "\n".join(f"{field:<30} {value}" for field, value in defaults.fields.items()),
            "template": "",
            "details": card["details"],
            "model_info": facts,
            "capabilities": ["embedding"] if self._inference.model.bidirectional else able,
            "modified_at": card["modified_at"],
        }
        return JSONResponse(shown)

    def _thinks(self, tokenizer: Tokenizer) -> bool:
        return thinking_of(self._inference.parsers.reasoning, tokenizer.chat_template) is not None

    async def _answer(
        self,
        request: Request,
        body: bodies.OllamaChat | bodies.OllamaGenerate,
        chat: schema.ChatRequest,
        key: ApiKey,
    ) -> Response:
        started = time.monotonic_ns()
        asked = await self._inference.ask(chat, key)
        bodies.check_thinking(body, self._thinks(asked.prompts.tokenizer))
        build = partial(OllamaAnswer, body, started)
        # Ollama fills the context, whatever num_predict is, so only the prompt has to fit.
        return await self._inference.chat(request, chat, key, build, asked, drops=body.truncate, caps=True)

    def _loaded(self, body: bodies.OllamaChat | bodies.OllamaGenerate, model: str, key: ApiKey) -> Response:
        """Answer to a request without a prompt: clients use it to load or unload a model."""
        self.check(model, key)
        reason = "unload" if body.keep_alive in (0, "0", "0s") else "load"
        shown = {"message": EMPTY} if isinstance(body, bodies.OllamaChat) else {"response": ""}
        common = {"model": body.model, "created_at": _now()}
        return JSONResponse({**common, **shown, "done": True, "done_reason": reason})

    def check(self, model: str, key: ApiKey) -> None:
        """Raises ApiError if there is no model of this name, or the key may not use it."""
        self._inference.choose_adapter(schema.GenerationRequest.model_validate({"model": model}), key)

    def meant(self, given: str) -> str:
        """Resolve a name: NAME:latest means NAME. An adapter's name may have another tag."""
        return given if given in self._inference.bases else given.removesuffix(LATEST)

    async def _seen(self, key: ApiKey, names: Container[str] | None = None) -> list[dict[str, Any]]:
        """Cards of the base model, and of adapters that the key may see. names: only of these; None: all."""
        await self._read_files()
        return [self._card(None)] * key.may_see(None) + [
            self._card(one)
            for one in self._catalog.entries()
            if (names is None or one.name in names)
            and self._inference.may_use(one.name, key)
            and (one.version is not None or one.problem is None)
        ]

    async def _read_files(self) -> None:
        if not self._files.num_bytes:
            self._files = await asyncio.to_thread(ModelFiles.read, self._folder, self._inference.model)

    def _card(self, entry: AdapterEntry | None) -> dict[str, Any]:
        """None: of the base model."""
        base, version = self._inference.bases[0], entry and entry.version  # None: not read yet
        name, size = (base, self._files.num_bytes) if entry is None else (entry.name, 0)
        tagged = name if ":" in name else name + LATEST
        created = datetime.fromtimestamp(version.created if version else self._created, timezone.utc)
        family = self._inference.model.architecture.partition("For")[0].lower()
        return {
            "name": tagged,
            "model": tagged,
            "modified_at": created.isoformat(),
            "size": version.facts.num_bytes if version else size,
            "digest": version.digest if version else "",
            "details": self._files.details(family, base if entry else ""),
        }


class OllamaAnswer(TranslatedChat):
    """asked: the body. started: when it arrived, in nanoseconds of the monotonic clock."""

    media_type = "application/x-ndjson"

    def __init__(
        self, asked: bodies.OllamaChat | bodies.OllamaGenerate, started: int, answers: Answers
    ) -> None:
        super().__init__(answers)
        self._started, self._asked_model = started, asked.model
        self._is_chat = isinstance(asked, bodies.OllamaChat)
        self._reason = "stop"
        self._calls: dict[int, dict[str, Any]] = {}  # which come whole, at the end

    def body(self) -> dict[str, Any]:
        chat = super().body()
        choice = chat["choices"][0]
        self._reason = DONE.get(choice["finish_reason"], "stop")
        message = choice["message"]
        calls, thought = message.get("tool_calls") or (), message.get("reasoning") or ""
        shown = self._content(message["content"] or "", calls, choice, thought)
        return {**self._common_fields(), **shown, **self._ending(chat["usage"])}

    def first_events(self) -> bytes:
        return b""

    def last_events(self, usage: bool) -> bytes:
        """Always includes token counts and durations."""
        ending = self._ending(self._usage_so_far())
        return self._line({**self._content("", (), {}), **ending}).encode()

    def error_events(self, error: ApiError) -> bytes:
        return f"{encode({'error': renamed(error, bodies.NAMES).message})}\n".encode()

    def _text_delta(self, index: int, text: str) -> str:
        shown = (
            f'"message":{{"role":"assistant","content":{text}}}' if self._is_chat else f'"response":{text}'
        )
        model = encode(self._asked_model)
        return f'{{"model":{model},"created_at":"{_now()}",{shown},"done":false}}\n'

    def _choice_event(self, choice: dict[str, Any]) -> str:
        delta, reason = choice["delta"], choice.get("finish_reason")
        calls: list[dict[str, Any]] = []
        for call in delta.get("tool_calls") or ():
            known = self._calls.setdefault(call["index"], call)
            if known is not call:
                known["function"]["arguments"] += call["function"]["arguments"]
        if reason is not None:
            self._reason = DONE.get(reason, "stop")
            calls = list(self._calls.values())
        text, thought = delta.get("content") or "", delta.get("reasoning") or ""
        if not (text or thought or calls or choice.get("logprobs")):
            return ""
        return self._line({**self._content(text, calls, choice, thought), "done": False})

    def _content(
        self, text: str, calls: Sequence[dict[str, Any]], choice: dict[str, Any], thought: str = ""
    ) -> dict[str, Any]:
        found: dict[str, Any] = {"response": text}
        if self._is_chat:
            found = {"message": {**EMPTY, "content": text}}
        if thought:
            (found["message"] if self._is_chat else found)["thinking"] = thought
        if calls:
            found["message"]["tool_calls"] = [_call(number, call) for number, call in enumerate(calls)]
        log_probs = (choice.get("logprobs") or {}).get("content")
        return found if log_probs is None else {**found, "logprobs": log_probs}

    def _line(self, shown: dict[str, Any]) -> str:
        return encode({**self._common_fields(), **shown}) + "\n"

    def _common_fields(self) -> dict[str, Any]:
        return {"model": self._asked_model, "created_at": _now()}

    def _ending(self, usage: dict[str, Any]) -> dict[str, Any]:
        load, prompt, output = durations(self.generations[0].metrics)
        return {
            "done": True,
            "done_reason": self._reason,
            "total_duration": time.monotonic_ns() - self._started,
            "load_duration": load,
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": prompt,
            "eval_count": usage["completion_tokens"],
            "eval_duration": output,
        }


def durations(times: RequestMetrics | None) -> tuple[int, int, int]:
    """Nanoseconds before the prompt started, for the prompt, and for the output. 1 if unknown."""
    if times is None or not times.first_token_ns:
        return 1, 1, 1
    at = times.arrival_ns, times.first_scheduled_ns, times.first_token_ns, times.last_token_ns
    return max(1, at[1] - at[0]), max(1, at[2] - at[1]), max(1, at[3] - at[2])


def _call(number: int, call: dict[str, Any]) -> dict[str, Any]:
    """Arguments are JSON text in a chat and an object here. Truncated arguments become empty."""
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        arguments = {}
    shown = {"index": call.get("index", number), "name": function["name"], "arguments": arguments}
    return {"id": call["id"], "function": shown}


def _now() -> str:
    return datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")
