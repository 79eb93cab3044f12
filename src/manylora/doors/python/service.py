"""Requests of an LLM from prompt to output, and Service, which passes them to an engine loop."""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from manylora.config.model import EncoderConfig
from manylora.doors.python.adapters import AdapterRegistry
from manylora.doors.python.llm_args import LoRAChoice, lora_of, members_of
from manylora.doors.python.outputs import GenerationResult, RequestOutput, RequestTimings
from manylora.engine.loop import EngineLoop, as_refusal
from manylora.errors import (
    AdapterError,
    AdapterNotFiniteError,
    DrainingError,
    EngineDeadError,
    ManyloraError,
    RequestCancelledError,
    RequestError,
)
from manylora.generation.chat_template import ROLES, call_arguments
from manylora.generation.decoding import Decoding
from manylora.generation.generation import Generation
from manylora.generation.outputs import PooledGeneration
from manylora.generation.sampling import SamplingParams
from manylora.generation.tokenizer import Tokenizer
from manylora.request import AdapterVersion, Event, FinishReason, LoraInput, Pooling, Request

Input = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or a mapping with `prompt` or `prompt_token_ids`.

For an encoder-decoder model the prompt is the encoder's. The mapping may have `decoder_input_token_ids`, with
which the decoder starts.
"""

DECODER_IDS = "decoder_input_token_ids"
SET_HERE = ("messages", "tools", "add_generation_prompt", "continue_final_message")  # template variables


@dataclass(frozen=True)
class Prompt:
    """text: None for token ids. decoder_ids: with which an encoder-decoder model's decoder starts."""

    text: str | None
    token_ids: tuple[int, ...]
    decoder_ids: tuple[int, ...] | None = None

    @property
    def length(self) -> int:
        """Number of tokens before the first new one."""
        return len(self.token_ids if self.decoder_ids is None else self.decoder_ids)


@dataclass(frozen=True)
class ChatText:
    """A rendered chat template: a prompt that already contains its special tokens."""

    text: str


def read_prompt(
    inputs: Input | ChatText,
    params: SamplingParams,
    tokenizer: Tokenizer | None,
    encoder: EncoderConfig | None,
    max_seq_len: int,
) -> Prompt:
    """max_seq_len: prompt and output, in tokens. Raises ValueError, RequestError."""
    if isinstance(inputs, Mapping):
        known = [name for name in ("prompt", "prompt_token_ids") if inputs.get(name) is not None]
        if len(known) != 1 or inputs.keys() - {"prompt", "prompt_token_ids", DECODER_IDS}:
            raise ValueError(
                "a prompt must be a text, token ids, or a dict with one of these as "
                "'prompt' or 'prompt_token_ids'"
            )
        prompt = read_prompt(inputs[known[0]], params, tokenizer, encoder, max_seq_len)
        given = inputs.get(DECODER_IDS)
        if given is None:
            return prompt
        if encoder is None:
            raise ValueError(f"{DECODER_IDS} is for encoder-decoder models: leave it out")
        ids = [token for token in given if isinstance(token, int)]
        if not ids or len(ids) < len(given):
            raise ValueError(f"{DECODER_IDS} must be a list of token ids, got {given!r:.80}")
        return replace(prompt, decoder_ids=tuple(ids))
    special = params.add_special_tokens
    if isinstance(inputs, ChatText):
        inputs, special = inputs.text, False
    text = inputs if isinstance(inputs, str) else None
    if text is None:
        ids = [token for token in inputs if isinstance(token, int)]
        if len(ids) < len(inputs):
            raise ValueError(f"a prompt must be a text or a list of token ids, got {inputs!r:.80}")
    elif tokenizer is None:
        raise ValueError("this LLM has no tokenizer (skip_tokenizer_init): prompts must be token ids")
    else:
        ids = tokenizer.encode(text, special, None if params.truncate_prompt_tokens else max_seq_len)
    if params.truncate_prompt_tokens is not None:
        ids = ids[-params.truncate_prompt_tokens :]
    return Prompt(text, tuple(ids), (encoder.decoder_start_id,) if encoder else None)


def as_prompts(inputs: Any) -> tuple[list[Any], bool]:
    """The prompts that a call was given, and whether it was a single one."""
    single = isinstance(inputs, str | Mapping) or (bool(inputs) and isinstance(inputs[0], int))
    return ([inputs] if single else list(inputs)), single


def for_each(prompts: Sequence[Any], name: str, value: Any, is_one: bool = False) -> list[Any]:
    """Returns one value per prompt for an argument that is either one value for all prompts, or a list or
    tuple with one for each. is_one: it is one value, whatever its type. Raises ValueError."""
    if is_one or not isinstance(value, list | tuple):
        return [value] * len(prompts)
    if len(value) != len(prompts):
        raise ValueError(f"{name} must be one, or one for each prompt: got {len(value)} for {len(prompts)}")
    return list(value)


def chat_variables(given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """chat_template_kwargs. Raises ValueError."""
    own = sorted(set(given or ()) & set(SET_HERE))
    if own:
        raise ValueError(f"chat_template_kwargs must not have {', '.join(own)}")
    return given or {}


def shown_message(message: Any) -> dict[str, Any]:
    """A message in the form that templates expect. Raises ValueError."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"messages: each must be a dict with a role, got {str(message)[:80]!r}")
    content = message.get("content")
    if isinstance(content, list):
        parts = [one for one in content if isinstance(one, Mapping) and one.get("type") == "text"]
        texts = [one["text"] for one in parts if isinstance(one.get("text"), str)]
        if len(texts) < len(content):
            raise ValueError("messages: content must be a text, or parts of type text")
        content = "\n".join(texts)
    elif not (content is None or isinstance(content, str)):
        raise ValueError(f"messages: content must be a text, got {str(content)[:80]!r}")
    shown = {**message, "role": ROLES.get(message["role"], message["role"]), "content": content or ""}
    if message.get("tool_calls"):
        try:
            shown["tool_calls"] = [_shown_call(call, call["function"]) for call in message["tool_calls"]]
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ValueError(
                'messages: tool_calls must be like [{"id": "1", "type": "function", "function": '
                '{"name": "f", "arguments": "{}"}}], whose arguments are a JSON object'
            ) from error
    return shown


def _shown_call(call: Mapping[str, Any], function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call_arguments(function.get("arguments"))
    return {**call, "function": {"name": function["name"], "arguments": arguments}}


class LlmGeneration(Generation):
    """Publishes on its `result` what each event brings. Raises RequestError."""

    def __init__(
        self,
        request_id: int,
        prompt: Prompt,
        decoding: Decoding,
        lora_request: LoRAChoice | None,
        streaming: bool,
        tokenizer: Tokenizer | None,
        abort: Callable[[LlmGeneration], None],
    ) -> None:
        members = members_of(lora_request)
        acting = next((one.lora_name for one, scale in members if scale), None)
        decoder = prompt.decoder_ids
        ids, encoder = (prompt.token_ids, ()) if decoder is None else (decoder, prompt.token_ids)
        super().__init__(ids, decoding, tokenizer, streaming, str(request_id), encoder, acting)
        self.lora_request = lora_request
        self.lora = lora_of(lora_request, follow=True)
        self.task_ids = [one.lora_int_id for one, _ in members]
        self.from_disk = False  # its adapter was not in the cache
        this = weakref.ref(self)  # avoids a reference cycle: dropping the last result frees the LLM at once

        def abort_if_open() -> None:
            if (generation := this()) is not None:
                abort(generation)

        self.result = GenerationResult(request_id, abort_if_open)
        self._prompt = prompt
        self._arrived = time.monotonic()
        self._first_token: float | None = None

    def take(self, event: Event) -> None:
        """Apply an event and publish what it brings. No effect once the request has ended."""
        if self.result.finished:
            return
        super().take(event)
        if self.error is not None:
            self.result.fail(self.error)
            return
        if self.streaming and self._first_token is None and event.token_ids:
            self._first_token = time.monotonic() - self._arrived
        if self.finished or (self.streaming and not self.complete):
            self.result.publish(self._output())

    def fail(self, error: Exception) -> None:
        super().fail(error)
        self.result.fail(error)

    def _output(self) -> RequestOutput:
        first, tier = self._first_token, ""
        if first is None and self.metrics and self.metrics.first_token_ns:
            first = self.metrics.first_token_ns * 1e-9 - self._arrived
        if self.lora_request is not None:
            # Whether it was read for this request or another one, this request waited for the disk.
            tier = "disk" if self.from_disk else self.metrics.adapter_tier if self.metrics else ""
        return RequestOutput(
            request_id=self.result.request_id,
            prompt=self._prompt.text,
            prompt_token_ids=list(self._prompt.token_ids),
            outputs=self.report(),
            finished=self.finished,
            lora_request=self.lora_request,
            timings=RequestTimings(first, time.monotonic() - self._arrived if self.finished else None),
            adapter_tier=tier,
            metrics=self.metrics,
            context_logits=self.context_logits,
        )


class LlmPooledGeneration(PooledGeneration):
    def __init__(
        self, request_id: int, prompt: tuple[int, ...], pooling: Pooling, lora_request: LoRAChoice | None
    ) -> None:
        super().__init__(prompt, pooling, str(request_id))
        self.lora_request, self.lora = lora_request, lora_of(lora_request)
        self.task_ids = [one.lora_int_id for one, _ in members_of(lora_request)]
        self.from_disk = False
        self.result: Future[np.ndarray] = Future()

    def take(self, event: Event) -> None:
        super().take(event)
        if self.values is not None and not self.result.done():
            self.result.set_result(self.values)
        elif self.error is not None and not self.result.done():
            cancelled = RequestCancelledError("The request was cancelled")
            self.result.set_exception(event.error or cancelled)

    def fail(self, error: Exception) -> None:
        super().fail(error)
        if not self.result.done():
            self.result.set_exception(error)


FETCHING = -1  # in place of a ticket: its adapter is being downloaded
SHUT_DOWN = "this LLM has been shut down"
CLOSING_S = 10.0  # for callers that are just entering to be refused
Sendable = LlmGeneration | LlmPooledGeneration

logger = logging.getLogger("manylora")


class Service:
    """Sends requests through a loop. Thread-safe. The engine reads an adapter from the registry's path when
    it is not in the cache (`resident`), so that an eviction is invisible to the caller.
    """

    def __init__(self, loop: EngineLoop, registry: AdapterRegistry, resident: Callable[[int], bool]) -> None:
        self.registry = registry
        self._loop, self._resident = loop, resident
        self._lock = threading.Condition()  # notified when a request is forgotten
        self._tickets: dict[Sendable, int] = {}  # open requests
        self._closed = False
        self._news: queue.SimpleQueue[tuple[Sendable, Event] | None] = queue.SimpleQueue()
        self._texts = threading.Thread(target=self._run, name="manylora-text", daemon=True)
        self._texts.start()

    def send(self, generation: Sendable) -> None:
        """Raises RequestError after `close`. All other errors are set on the generation's result."""
        generation.from_disk = not all(map(self._resident, generation.task_ids))
        request = generation.request(generation.lora)
        with self._lock:
            if self._closed:
                raise RequestError(SHUT_DOWN)
            self._tickets[generation] = FETCHING
        fetching = self.registry.fetch(generation.task_ids)
        if fetching is None:
            self._submit(generation, request)
        else:
            fetching.add_done_callback(lambda done: self._submit(generation, request, done.exception()))

    def _submit(self, generation: Sendable, request: Request, problem: BaseException | None = None) -> None:
        """Unless it was aborted. problem: its adapter could not be downloaded."""
        with self._lock:
            if self._tickets.get(generation) != FETCHING:
                return
            try:
                if problem is not None:
                    raise as_refusal(problem, "The adapter could not be read")
                self._tickets[generation] = self._loop.submit(
                    request, lambda event: self._news.put((generation, event))
                )
            except ManyloraError as error:
                event = Event(finish_reason=FinishReason.ERROR, last=True, error=error)
                self._news.put((generation, event))

    def pin(self, task_id: int) -> RequestError | None:
        """Pin an adapter that is in the cache. Returns the reason if that fails."""
        try:
            self._loop.pin(task_id).result()
        except (DrainingError, EngineDeadError):
            return RequestError(SHUT_DOWN)
        except RequestError as error:
            return error
        return None

    def publish(self, lora: LoraInput) -> AdapterVersion:
        """As `EngineLoop.publish`, but waits."""
        with self._lock:
            if self._closed:
                raise RequestError(SHUT_DOWN)
            done = self._loop.publish(lora)
        return done.result()

    def abort(self, generation: Sendable) -> None:
        with self._lock:
            ticket = self._tickets.get(generation)
            if ticket == FETCHING:
                del self._tickets[generation]
                self._news.put((generation, Event(finish_reason=FinishReason.CANCELLED, last=True)))
        if ticket not in (None, FETCHING):
            self._loop.cancel(ticket)

    def close(self) -> None:
        """Cancel open requests and end the threads. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            everyone = list(self._tickets)
        for generation in everyone:
            self.abort(generation)
        self._loop.close(drain=False)
        with self._lock:
            self._lock.wait_for(lambda: not self._tickets, CLOSING_S)
        self._news.put(None)
        self._texts.join()

    def _run(self) -> None:
        """The text thread. It must survive every error, because all answers pass through it."""
        going = True
        while going:
            try:
                going = self._take_news()
            except Exception:
                logger.exception("an answer was lost")

    def _take_news(self) -> bool:
        """Pass one event on. Apart, because a waiting thread keeps its local variables, and so the LLM."""
        news = self._news.get()
        if news is None:
            return False
        generation, event = news
        if event.last:  # first, so that a bad adapter's id is free once the result is known
            with self._lock:
                self._tickets.pop(generation, None)
                self._lock.notify_all()
            # An adapter with overflowing logits is in the cache, under its id.
            refused = isinstance(event.error, AdapterError)
            accepted = not refused or isinstance(event.error, AdapterNotFiniteError)
            self.registry.release(generation.task_ids, accepted)
        try:
            generation.take(event)
        except Exception as error:
            logger.exception("making text failed")
            generation.fail(RequestError(f"The text could not be made: {type(error).__name__}"))
        if generation.complete and not event.last:  # ended by a stop text: the engine can stop
            self.abort(generation)
        return True
