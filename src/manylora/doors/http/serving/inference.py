"""Inference: from a validated request body to the response, complete or streamed."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from manylora.adapters.catalog.names import ASKERS, is_name
from manylora.config.model import ModelConfig
from manylora.doors.http.api import schema
from manylora.doors.http.api.errors import (
    ApiError,
    as_api_error,
    check_name,
    invalid_value,
    unsupported_field,
)
from manylora.doors.http.api.params import Limits, Shared, plan, shared_of
from manylora.doors.http.api.schema import AdapterFields, ChatRequest, CompletionRequest, GenerationRequest
from manylora.doors.http.serving import responses
from manylora.doors.http.serving.backend import AdapterChoice, Backend, Call
from manylora.doors.http.serving.keys import ANYONE, ApiKey
from manylora.doors.http.serving.prompts import Prompts
from manylora.doors.http.serving.responses import Answers, Echo, ResponseBuilder, RunningCalls
from manylora.doors.http.serving.transport import EventStream, name_of
from manylora.doors.http.serving.usage import Names
from manylora.doors.triton.metrics import MAX_ADAPTERS, OTHER
from manylora.errors import RequestError
from manylora.generation.defaults import NO_DEFAULTS, GenerationDefaults
from manylora.generation.generation import Generation
from manylora.generation.outputs import PooledGeneration
from manylora.generation.reply_formats import CHOSEN_BY_TEMPLATE, Parsers
from manylora.generation.tokenizer import Tokenizer
from manylora.request import MAX_MIXED, MAX_SCALE, Pooling

PROBE_S = 2.0
PLACEHOLDERS = ("tgi", "dummy")  # what clients of TGI send as the model of the server at a URL
BuildResponse = Callable[[Answers], ResponseBuilder]


@dataclass(frozen=True)
class ResolvedRequest:
    """What a request asks for. prompts, defaults: the adapter's own, or the base model's."""

    choice: AdapterChoice
    prompts: Prompts
    names: Names
    defaults: GenerationDefaults = NO_DEFAULTS

    def end_ids(self, model: ModelConfig) -> list[int]:
        """Tokens that end an output."""
        named, own = self.prompts.tokenizer.eos_id, self.defaults.fields.get("stop_token_ids", ())
        found = {*(self.defaults.end_ids or model.eos_token_ids), *own}
        return sorted(found if named is None else {*found, named})


class Inference:
    """bases: names of the base model; responses use the first. fingerprint: identifies it. paths: further
    names of it, which are not listed. defaults: its own, for fields that a request leaves out. parsers: of
    reasoning and tool calls. tells_cached: `usage` tells the prompt's tokens whose KV blocks were cached.
    """

    def __init__(
        self,
        backend: Backend,
        tokenizer: Tokenizer,
        model: ModelConfig,
        limits: Limits,
        bases: Sequence[str],
        fingerprint: str,
        paths: Sequence[str] = (),
        defaults: GenerationDefaults = NO_DEFAULTS,
        parsers: Parsers = CHOSEN_BY_TEMPLATE,
        *,
        tells_cached: bool = False,
    ) -> None:
        self.backend, self.tokenizer, self.limits, self.bases = backend, tokenizer, limits, bases
        self.model, self._fingerprint, self._paths = model, fingerprint, paths
        self.defaults, self.parsers, self._tells_cached = defaults, parsers, tells_cached
        self.prompts = Prompts(tokenizer, limits)
        self._probe: asyncio.Task[None] | None = None
        self._probed_at = 0.0
        self.shared_names: Counter[tuple[str, str]] = Counter()  # requests by alias and chosen model

    async def chat(
        self,
        request: Request,
        body: ChatRequest,
        key: ApiKey,
        build: BuildResponse = responses.ChatResponse,
        asked: ResolvedRequest | None = None,
        *,
        drops: bool = False,
        caps: bool = False,
    ) -> Response:
        """build: creates the response's builder. asked: None: as from `ask`, with this body. drops: the
        oldest messages, until the rest fits. caps: max_tokens, to what fits then.
        """
        asked, most = asked or await self.ask(body, key), body.max_tokens
        if caps:
            body = body.model_copy(update={"max_tokens": None})
        if drops:
            body, prompt = await asked.prompts.chat_that_fits(body)
        else:
            prompt = await asked.prompts.chat(body)
        if caps and most is not None:
            body.max_tokens = min(most, self.room(len(prompt.ids)))
        if body.return_expanded_prompt and body.stream:
            name = "return_expanded_prompt"
            raise unsupported_field(f"{name} needs stream false", name)
        return await self._respond(request, body, asked, build, [prompt.ids], prompt.text)

    def room(self, num_prompt: int) -> int:
        """The most tokens that an answer may have, at least 1."""
        return max(1, self.limits.max_seq_len - num_prompt)

    async def ask(self, body: AdapterFields, key: ApiKey) -> ResolvedRequest:
        """Which adapter a body asks for, and the text settings that apply. Raises as reading the adapter."""
        choice = self.choose_adapter(body, key)
        prompts, defaults = await self._text_of(choice.alone, fresh=body.load_lora_weights == "always")
        model = choice.answers or body.model or choice.name or self.bases[0]
        return ResolvedRequest(choice, prompts, Names(key.name, model, body.model or model), defaults)

    async def prompts_of(self, model: str, key: ApiKey) -> Prompts:
        """Tokenizer and chat template of a model that the key may use. For other names the base model's."""
        return (await self.text_of(model, key))[0]

    async def text_of(self, model: str, key: ApiKey) -> tuple[Prompts, GenerationDefaults]:
        """The same, with the generation defaults."""
        catalog = self.backend.catalog
        name = catalog.aliases.resolve(model)
        return await self._text_of(name if catalog.has(name) and self.may_use(model, key) else None)

    def may_use(self, name: str, key: ApiKey) -> bool:
        """An alias counts by its own name, because its creator decided who may use it."""
        catalog = self.backend.catalog
        if not set(self.bases).isdisjoint(catalog.aliases.targets(name)):
            return key.may_see(None) and (name in self.bases or key.may_see(name))
        return key.may_see(name, catalog.owner_of(name))

    def check_use(self, name: str, key: ApiKey, what: str = "adapter", field: str = "model") -> None:
        """Raises ApiError: 403 for a name outside the key's patterns, whether or not it exists; 404 for
        another owner's adapter, as for one that does not exist.
        """
        key.check(name)
        if not self.may_use(name, key):
            raise _not_found(what, name, field)

    def sees_all(self, key: ApiKey) -> bool:
        """Whether no adapter is hidden from the key."""
        if key.admin or not key.sees_all:
            return key.admin
        return all(self.may_use(entry.name, key) for entry in self.backend.catalog.entries())

    async def _text_of(self, name: str | None, *, fresh: bool = False) -> tuple[Prompts, GenerationDefaults]:
        text = None if name is None else await self.backend.catalog.text(name, fresh=fresh)
        if text is None:
            return self.prompts, self.defaults
        return self.prompts.with_tokenizer(text.tokenizer), text.defaults.over(self.defaults)

    async def complete(
        self,
        request: Request,
        body: CompletionRequest,
        key: ApiKey,
        build: BuildResponse = responses.CompletionResponse,
        asked: ResolvedRequest | None = None,
    ) -> Response:
        """asked: None: as from `ask`, with this body."""
        given, special = _prompts(body.prompt), body.add_special_tokens
        self._check_count(len(given) * (body.best_of or body.n))
        whole = body.truncate_prompt_tokens is None
        asked = asked or await self.ask(body, key)
        encode = asked.prompts.encode
        prompts = [
            await encode(one, special, "prompt", whole) if isinstance(one, str) else tuple(one)
            for one in given
        ]
        self._check_ids(prompts)
        return await self._respond(request, body, asked, build, prompts)

    def prepare(
        self, body: CompletionRequest, prompt: tuple[int, ...], asked: ResolvedRequest
    ) -> Call[Generation]:
        """The call of one prompt, for `finish`. asked: as from `ask`. Raises ApiError."""
        self._check_count(body.n)
        self._check_ids([prompt])
        self.count_shared(asked.choice)
        shared, name = shared_of(body, self.limits, self.tokenizer), secrets.token_hex(12)
        return self._call(body, prompt, asked, asyncio.Event(), name, shared)

    def count_shared(self, choice: AdapterChoice) -> None:
        """Count what its aliases mean. The first MAX_ADAPTERS pairs have their own labels in metrics."""
        for pair in choice.shared:
            known = pair in self.shared_names or len(self.shared_names) < MAX_ADAPTERS
            self.shared_names[pair if known else (OTHER, OTHER)] += 1

    async def finish(self, call: Call[Any]) -> Any:
        """Run a call to its end, whoever waits for it. Returns its generation. Raises ApiError."""
        self.backend.submit(call)
        try:
            while not call.generation.finished:
                await call.changed.wait()
                call.changed.clear()
        finally:
            self.backend.cancel(call)
        if call.error is not None:
            raise call.error
        return call.generation

    async def probe(self) -> None:
        """Generate two tokens, or a hidden state, with the base model. Raises ApiError if that fails.

        One at a time: its result is that of everyone who asks meanwhile, or within PROBE_S of its start.
        """
        now, last = time.monotonic(), self._probe
        if last is None or (last.done() and now - self._probed_at >= PROBE_S):
            last = self._probe = asyncio.create_task(
                self._generate_two(None) if self.model.makes_text else self._compute_one(None)
            )
            self._probed_at = now
        await asyncio.shield(last)  # one client that disconnects does not end it for the others

    async def load(self, name: str) -> None:
        """Load an adapter to the cache, as a request would. Raises ApiError."""
        if self.model.encoder is None:
            await self._compute_one(name)  # an adapter with a classification head generates no text
        else:
            await self._generate_two(name)

    async def _generate_two(self, name: str | None) -> None:
        body = CompletionRequest.model_validate({"prompt": "a", "max_tokens": 2, "temperature": 0.0})
        asked = ResolvedRequest(AdapterChoice(name=name), self.prompts, Names())
        prompt, shared = tuple(self.tokenizer.encode("a")), shared_of(body, self.limits, self.tokenizer)
        await self.finish(self._call(body, prompt, asked, asyncio.Event(), "health", shared))

    async def _compute_one(self, name: str | None) -> None:
        state = PooledGeneration(tuple(self.tokenizer.encode("a")), Pooling(), "health")
        await self.finish(Call(state, asyncio.Event(), AdapterChoice(name=name)))

    def _check_ids(self, prompts: Sequence[tuple[int, ...]]) -> None:
        most = self.limits.vocab_size - 1
        if not all(prompts):
            raise invalid_value("prompt: must have at least one token", "prompt")
        if max(map(max, prompts)) > most:
            raise invalid_value(f"prompt: token ids must be at most {most}", "prompt")

    def _check_count(self, count: int) -> None:
        most = self.limits.max_sequences
        if count > most:
            raise invalid_value(f"n: at most {most} outputs in one request, of all prompts together", "n")

    async def _respond(
        self,
        request: Request,
        body: GenerationRequest,
        asked: ResolvedRequest,
        build: BuildResponse,
        prompts: Sequence[tuple[int, ...]],
        rendered: str = "",
    ) -> Response:
        """rendered: the chat template. Empty for completions."""
        self._check_count(len(prompts) * (getattr(body, "best_of", None) or body.n))
        if body.stream_options is not None and not body.stream:
            raise invalid_value("stream_options needs stream true", "stream_options")
        if body.truncate_prompt_tokens is not None:
            prompts = [prompt[-body.truncate_prompt_tokens :] for prompt in prompts]
        changed, name = asyncio.Event(), name_of(request, body.request_id)
        self.count_shared(asked.choice)
        shared = shared_of(body, self.limits, asked.prompts.tokenizer, rendered, self.parsers)
        calls = [
            self._call(body, prompt, asked, changed, f"{name}-{number}", shared)
            for number, prompt in enumerate(prompts)
        ]
        with ExitStack() as stack:
            run = RunningCalls(self.backend, calls, request, asked.names)
            stack.callback(run.close)
            await run.begin()
            options = body.stream_options or schema.StreamOptions()
            answers = Answers(
                [call.generation for call in calls],
                body.n,
                model=asked.names.model,
                fingerprint="-".join(filter(None, (self._fingerprint, calls[0].content[:12]))),
                tokenizer=asked.prompts.tokenizer,
                name=name,
                token_ids=body.return_token_ids,
                running_usage=options.continuous_usage_stats,
                cached_tokens=self._tells_cached,
                reply=shared.reply,
                expanded_prompt=rendered if getattr(body, "return_expanded_prompt", False) else None,
                echoes=_echoes(body, calls, asked.prompts.tokenizer),
            )
            builder = build(answers)
            if body.stream:
                events = run.stream(builder, options.include_usage)
                return EventStream(events, stack.pop_all().close, builder.media_type)
            await run.finish()
            return JSONResponse(builder.body())

    def choose_adapter(self, body: AdapterFields, key: ApiKey) -> AdapterChoice:
        """Raises ApiError, also if the key may not use the adapter or there is none of that name."""
        catalog = self.backend.catalog
        names = catalog.aliases

        def known(name: str) -> bool:
            return (catalog.has(name) or name in names) and self.may_use(name, key)

        def name_of_path(path: str) -> str:
            """A key that may not see everything must not learn which paths exist."""
            try:
                return catalog.name_of_path(path)
            except RequestError as error:
                if key.sees_all:
                    raise
                reason = "This API key may not use this lora_path"
                raise ApiError(403, "not_allowed", reason, "lora_path") from error

        choice = choose_adapter(body, [*self.bases, *self._paths], known, name_of_path)
        members, by = [], asker(body, key)
        for given, scale in choice.adapters:
            self.check_use(given, key, "model", choice.field)
            name = names.resolve(given, by)
            if len(names.targets(given)) > 1:
                choice = replace(choice, shared=(*choice.shared, (given, name)))
            if name not in self.bases and not catalog.has(name):
                raise _not_found("model", given, choice.field)
            if name not in self.bases:
                members.append((name, scale))
        if not any(scale for _, scale in members):
            if all(not scale for _, scale in choice.adapters):  # otherwise the base model's alias was checked
                key.check(None)
            return replace(choice, name=None, mix=())
        if choice.mix:
            return replace(choice, mix=tuple(members))
        return replace(choice, name=members[0][0])

    def _call(
        self,
        body: GenerationRequest,
        prompt: tuple[int, ...],
        asked: ResolvedRequest,
        changed: asyncio.Event,
        request_id: str,
        shared: Shared,
    ) -> Call[Generation]:
        tokenizer = asked.prompts.tokenizer
        try:
            decoding = plan(body, len(prompt), tokenizer, self.model, self.limits, shared, asked.defaults)
        except (ValueError, RequestError) as error:
            raise as_api_error(error) from error
        return Call(
            Generation(prompt, decoding, tokenizer, body.stream, request_id),
            changed,
            asked.choice,
            body.load_lora_weights,
            follow=body.lora_version == "follow",
            guide_field=shared.guide_field,
            priority=body.priority,
        )


def asker(body: AdapterFields, key: ApiKey) -> str:
    """Who asks, for aliases of several models: the user that the body names, or else the key."""
    named = (getattr(body, field, None) for field in ASKERS)
    own = key.name if key.name != ANYONE else secrets.token_hex(8)  # then each request is on its own
    return next(filter(None, named), own)


def _echoes(body: GenerationRequest, calls: Sequence[Call[Generation]], tokenizer: Tokenizer) -> list[Echo]:
    """For each prompt, the text to return before the output. Empty if the body does not ask for it."""
    found: list[Echo] = []
    if not (isinstance(body, CompletionRequest) and body.echo):
        return found
    for given, call in zip(_prompts(body.prompt), calls, strict=True):
        ids, cut = call.generation.prompt, body.truncate_prompt_tokens
        if isinstance(given, str) and (cut is None or len(ids) < cut):
            added = tokenizer.encode("") if body.add_special_tokens else []
            found.append(Echo(given, next((i for i, one in enumerate(added) if one != ids[i]), len(added))))
        else:
            found.append(Echo(tokenizer.decode(ids, False)))
    return found


def choose_adapter(
    body: AdapterFields,
    bases: Sequence[str],
    known: Callable[[str], bool],
    name_of_path: Callable[[str], str],
) -> AdapterChoice:
    """Six fields can name an adapter. All that are given must agree: else raises ApiError 400 with two
    fields.

    known: whether an adapter has this name. name_of_path: may raise ApiError.
    """
    choices = list(_by_other_fields(body, known, name_of_path))
    model = body.model
    if model and model not in bases and (model not in PLACEHOLDERS or known(model)):
        base = next((base for base in bases if model.startswith(base + ":")), None)
        model = model if base is None else model[len(base) + 1 :]
        # Beside another field, an unknown `model` means the base model: many servers ignore that field, so
        # clients put anything into it.
        if base is not None or not choices or known(model):
            if "+" in model:
                choices.insert(0, _mix("model", [(name, 1.0) for name in model.split("+")]))
            else:
                choices.insert(0, AdapterChoice("model", check_name(model, "model")))
    for other in choices[1:]:
        if other.adapters != choices[0].adapters:
            reason = (
                f"{choices[0].field} and {other.field} choose different adapters: give one of them, or the "
            )
            raise ApiError(400, "adapter_conflict", reason + "same adapter in both", other.field)
    if not choices and body.load_lora_weights != "auto":
        reason = "load_lora_weights is for an adapter, and this request names none: name one, or leave it out"
        raise invalid_value(reason, "load_lora_weights")
    return max(choices, key=lambda choice: choice.source is not None, default=AdapterChoice())


def _mix(field: str, members: Sequence[tuple[str, float]]) -> AdapterChoice:
    """Raises ApiError."""
    if len(members) > MAX_MIXED:
        raise invalid_value(f"{field}: at most {MAX_MIXED} adapters act together", field)
    names = [check_name(name, field) for name, _ in members]
    if any(abs(sum(s for other, s in members if other == name)) > MAX_SCALE for name in names):
        reason = f"{field}: the scales of one adapter may add up to at most {MAX_SCALE:g} in magnitude"
        raise invalid_value(reason, field)
    if len(members) == 1 and members[0][1] == 1:
        return AdapterChoice(field, names[0])
    return AdapterChoice(field, "+".join(names) or None, mix=tuple(members))


def _by_other_fields(
    body: AdapterFields, known: Callable[[str], bool], name_of_path: Callable[[str], str]
) -> Iterator[AdapterChoice]:
    if body.lora is not None:
        yield _mix("lora", [(one.name, one.scale) for one in body.lora])
    for field in ("lora_model", "adapter_id"):
        name = getattr(body, field)
        if name is not None:
            yield AdapterChoice(field, check_name(name, field))
    path, lora = body.lora_path, body.lora_request
    if path is not None:  # SGLang's field: a name or a path
        yield AdapterChoice("lora_path", path if is_name(path) and known(path) else name_of_path(path))
    if lora is None:
        return
    if lora.lora_path is None and lora.lora_name is None:
        raise ApiError(400, "missing_field", "lora_request needs a lora_name or a lora_path", "lora_request")
    # With a path, an unknown name is only the client's label.
    if lora.lora_name is not None and (lora.lora_path is None or known(lora.lora_name)):
        field = "lora_request.lora_name"
        yield AdapterChoice(field, check_name(lora.lora_name, field), lora.lora_ckpt_source)
    if lora.lora_path is not None:
        yield AdapterChoice("lora_request.lora_path", name_of_path(lora.lora_path), lora.lora_ckpt_source)


def _not_found(what: str, name: str, field: str) -> ApiError:
    hint = ": GET /v1/models lists those that do" if what == "model" else ""
    return ApiError(404, "adapter_not_found", f"{what} {name!r} does not exist{hint}", field)


def _prompts(given: str | list[int] | list[str] | list[list[int]]) -> list[str | list[int]]:
    """One or several prompts, each a text or token ids."""
    if isinstance(given, str):
        return [given]
    if given and isinstance(given[0], int):
        return [given]
    if not given:
        raise invalid_value("prompt: must not be empty", "prompt")
    return list(given)  # type: ignore[arg-type]
