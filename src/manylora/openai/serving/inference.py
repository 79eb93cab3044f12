"""Inference: from a validated request body to the response, whole or as a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from manylora.config.engine import ModelConfig
from manylora.errors import RequestError
from manylora.openai.api.adapter_choice import AdapterChoice, choose_adapter
from manylora.openai.api.errors import ApiError, as_api_error, invalid_value, unsupported_field
from manylora.openai.api.params import Limits, Shared, plan, shared_of
from manylora.openai.api.schema import ChatRequest, CompletionRequest, GenerationRequest, StreamOptions
from manylora.openai.api.tools import tool_use
from manylora.openai.serving.backend import Backend, Call
from manylora.openai.serving.event_queue import Signal
from manylora.openai.serving.generation import GenerationState
from manylora.openai.serving.keys import ApiKey
from manylora.openai.serving.prompts import ChatPrompt, Prompts
from manylora.openai.serving.responses import (
    ChatResponse,
    CompletionResponse,
    Echo,
    ResponseBuilder,
    Shown,
)
from manylora.openai.serving.transport import EventStream, name_of, watch
from manylora.text.tokenizer import Tokenizer

BuildResponse = Callable[..., ResponseBuilder]
"""Called with what `ResponseBuilder` takes; for chats also with what `ChatResponse` takes."""


class Inference:
    """bases: names of the base model; responses use the first. fingerprint: identifies the base model."""

    def __init__(
        self,
        backend: Backend,
        tokenizer: Tokenizer,
        model: ModelConfig,
        limits: Limits,
        bases: Sequence[str],
        fingerprint: str,
    ) -> None:
        self.backend, self.tokenizer, self.limits, self.bases = backend, tokenizer, limits, bases
        self.model, self._fingerprint = model, fingerprint
        self.prompts = Prompts(tokenizer, limits)
        # Called when a client disconnects during a stream.
        self.on_disconnect: Callable[[], None] = lambda: None

    async def chat(
        self, request: Request, body: ChatRequest, key: ApiKey, build: BuildResponse | None = None
    ) -> Response:
        """build: makes the builder of the response; None: the OpenAI API's own for chats."""
        return await self.chat_from(request, body, key, await self.prompts.chat(body), build)

    async def chat_from(
        self,
        request: Request,
        body: ChatRequest,
        key: ApiKey,
        prompt: ChatPrompt,
        build: BuildResponse | None = None,
    ) -> Response:
        """prompt: of this body."""
        if body.return_expanded_prompt and body.stream:
            name = "return_expanded_prompt"
            raise unsupported_field(f"{name} needs stream false", name)
        return await self._respond(request, body, key, [prompt.ids], [prompt.text], build)

    async def complete(
        self, request: Request, body: CompletionRequest, key: ApiKey, build: BuildResponse | None = None
    ) -> Response:
        given, special = _prompts(body.prompt), body.add_special_tokens
        self._check_count(len(given) * (body.best_of or body.n))
        whole = body.truncate_prompt_tokens is None
        encode = self.prompts.encode
        prompts = [
            await encode(one, special, "prompt", whole) if isinstance(one, str) else tuple(one)
            for one in given
        ]
        for prompt in prompts:
            self._check_ids(prompt)
        return await self._respond(request, body, key, prompts, build=build)

    async def probe(self) -> None:
        """Generate two tokens with the base model, for health checks. Raises ApiError when that fails."""
        body = CompletionRequest.model_validate({"prompt": "a", "max_tokens": 2, "temperature": 0.0})
        call = self._call(body, tuple(self.tokenizer.encode("a")), None, "", Signal(), "health")
        self.backend.submit(call)
        try:
            while not call.generation.finished:
                await call.generation.changed.wait()
        finally:
            self.backend.cancel(call)
        if call.generation.error is not None:
            raise as_api_error(call.generation.error)

    def _check_count(self, count: int) -> None:
        if count > self.limits.max_sequences:
            raise invalid_value(
                f"n: at most {self.limits.max_sequences} outputs in one request, of all prompts together", "n"
            )

    def _check_ids(self, ids: Sequence[int]) -> None:
        if not ids:
            raise invalid_value("prompt: it has no tokens", "prompt")
        if max(ids) >= self.limits.vocab_size:
            most = self.limits.vocab_size - 1
            raise invalid_value(f"prompt: token ids must be at most {most}", "prompt")

    async def _respond(
        self,
        request: Request,
        body: GenerationRequest,
        key: ApiKey,
        prompts: Sequence[tuple[int, ...]],
        texts: Sequence[str] = (),
        build: BuildResponse | None = None,
    ) -> Response:
        """texts: the chat template's text of each prompt; empty for completions."""
        choice = self.choose_adapter(body, key)
        self._check_count(len(prompts) * (getattr(body, "best_of", None) or body.n))
        if body.stream_options is not None and not body.stream:
            raise invalid_value("stream_options needs stream true", "stream_options")
        if body.truncate_prompt_tokens is not None:
            prompts = [prompt[-body.truncate_prompt_tokens :] for prompt in prompts]
        changed, name = Signal(), name_of(request, body.request_id)
        shared = shared_of(body, self.limits)
        calls = [
            self._call(body, prompt, choice.name, choice.source or "", changed, f"{name}-{number}", shared)
            for number, prompt in enumerate(prompts)
        ]
        with ExitStack() as stack:
            stack.enter_context(key.request())
            on_disconnect = self.on_disconnect if body.stream else None
            run = _Run(self.backend, calls, changed, request, on_disconnect)
            stack.callback(run.close)
            await run.begin()
            builder = self._response_builder(body, calls, choice.name, texts, name, build)
            if body.stream:
                usage = (body.stream_options or StreamOptions()).include_usage
                events = run.stream(builder, usage)
                return EventStream(events, run.watcher, stack.pop_all().close, builder.media_type)
            await run.finish()
            return JSONResponse(builder.body())

    def choose_adapter(self, body: GenerationRequest, key: ApiKey) -> AdapterChoice:
        """Raises ApiError, also when the key may not use the adapter, or there is none of that name."""
        catalog = self.backend.catalog
        choice = choose_adapter(
            body,
            self.bases,
            lambda name: catalog.has(name) and key.may_see(name),
            lambda path: _name_of_path(key, path, catalog.name_of_path),
        )
        key.check(choice.name)
        if choice.name is not None and not catalog.has(choice.name):
            raise ApiError(404, "adapter_not_found", f"model {choice.name!r} does not exist", choice.field)
        return choice

    def _call(
        self,
        body: GenerationRequest,
        prompt: tuple[int, ...],
        adapter: str | None,
        source: str,
        changed: Signal,
        request_id: str,
        shared: Shared | None = None,
    ) -> Call:
        try:
            planned = plan(body, len(prompt), self.tokenizer, self.model, self.limits, shared)
        except (ValueError, RequestError) as error:
            raise as_api_error(error) from error
        generation = GenerationState(prompt, planned, body.stream, self.tokenizer, request_id, changed)
        return Call(generation, adapter, body.load_lora_weights, source or None)

    def _response_builder(
        self,
        body: GenerationRequest,
        calls: Sequence[Call],
        adapter: str | None,
        texts: Sequence[str],
        name: str,
        build: BuildResponse | None,
    ) -> ResponseBuilder:
        model = body.model or adapter or self.bases[0]
        version = calls[0].version
        fingerprint = self._fingerprint
        if version is not None:
            fingerprint += f"-{version.digest[:12]}"
        generations = [call.generation for call in calls]
        arguments = (generations, body.n, model, fingerprint, self.tokenizer)
        running_usage = (body.stream_options or StreamOptions()).continuous_usage_stats
        shown = Shown(name, body.return_token_ids, running_usage)
        if isinstance(body, ChatRequest):
            expanded = texts[0] if body.return_expanded_prompt else None
            make = build or ChatResponse
            return make(*arguments, shown, use=tool_use(body), expanded_prompt=expanded)
        if build is not None:
            return build(*arguments, shown)
        if isinstance(body, CompletionRequest) and body.echo:
            return CompletionResponse(*arguments, shown, echoes=self._echoes(body, generations))
        return CompletionResponse(*arguments, shown)

    def _echoes(self, body: CompletionRequest, generations: Sequence[GenerationState]) -> list[Echo]:
        """Of each prompt, the text that is returned before the output."""
        found = []
        for given, generation in zip(_prompts(body.prompt), generations, strict=True):
            ids, cut = generation.prompt, body.truncate_prompt_tokens
            if isinstance(given, str) and (cut is None or len(ids) < cut):
                added = self.tokenizer.encode("") if body.add_special_tokens else []
                found.append(
                    Echo(given, next((i for i, one in enumerate(added) if one != ids[i]), len(added)))
                )
            else:
                found.append(Echo(self.tokenizer.decode(ids, False)))
        return found


class _Run:
    """The calls of one HTTP request. They are cancelled when its client disconnects.

    on_disconnect: called when that happens during a stream; None where the response's status is counted.
    """

    def __init__(
        self,
        backend: Backend,
        calls: Sequence[Call],
        changed: Signal,
        request: Request,
        on_disconnect: Callable[[], None] | None,
    ) -> None:
        self._on_disconnect = on_disconnect
        self._streaming = False
        self._backend, self._calls, self._changed = backend, calls, changed
        self._disconnected = False
        self.watcher = watch(request.receive, self._set_disconnected)

    async def begin(self) -> None:
        """Start, and wait for the first change: until then an error becomes an HTTP status."""
        for call in self._calls:
            self._backend.submit(call)
        await self._wait()

    async def finish(self) -> None:
        while not all(call.generation.finished for call in self._calls):
            await self._wait()

    async def stream(self, builder: ResponseBuilder, usage: bool) -> AsyncIterator[bytes]:
        self._streaming = True
        try:
            events = builder.first_events()
            if events:
                yield events
            while True:
                finished = all(call.generation.complete for call in self._calls)
                events = builder.new_events()
                if finished:
                    break
                if events:
                    yield events
                await self._wait()
            yield events + builder.last_events(usage)
            self._streaming = False
        except ApiError as error:
            if error.status != 499:
                self._streaming = False
            yield builder.error_events(error)

    def close(self) -> None:
        if self._streaming and self._on_disconnect is not None:  # the stream is not complete
            self._on_disconnect()
        self.watcher.cancel()
        for call in self._calls:
            if not call.generation.ended:
                self._backend.cancel(call)

    async def _wait(self) -> None:
        """Wait for a change. Raises ApiError when a call has failed or the client has disconnected."""
        await self._changed.wait()
        if self._disconnected:
            raise ApiError(499, "client_left", "The client has closed the connection")
        for call in self._calls:
            if call.generation.error is not None:
                raise as_api_error(call.generation.error)

    def _set_disconnected(self) -> None:
        self._disconnected = True
        self._changed.set()


def _name_of_path(key: ApiKey, path: str, name_of_path: Callable[[str], str]) -> str:
    """The adapter at a path. A key that may not see everything must not learn which paths exist."""
    try:
        return name_of_path(path)
    except ApiError as error:
        if key.sees_all:
            raise
        raise ApiError(403, "not_allowed", "This API key may not use this lora_path", "lora_path") from error


def _prompts(given: str | list[int] | list[str] | list[list[int]]) -> list[str | list[int]]:
    """A text or token ids, or several of either."""
    if isinstance(given, str):
        return [given]
    if given and isinstance(given[0], int):
        return [given]
    if not given:
        raise invalid_value("prompt: there is none", "prompt")
    return list(given)  # type: ignore[arg-type]
