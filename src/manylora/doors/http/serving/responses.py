"""Responses of completions and chats, complete or as events, and the calls that they are made from."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from manylora.doors.http.api import logprobs
from manylora.doors.http.api.errors import ApiError, client_left
from manylora.doors.http.api.logprobs import TextOffsets
from manylora.doors.http.serving.backend import Backend, Call
from manylora.doors.http.serving.transport import watch
from manylora.doors.http.serving.usage import Names, report
from manylora.generation.generation import Generation
from manylora.generation.outputs import CompletionOutput
from manylora.generation.reply import Piece, ReplyFormat, ReplyReader
from manylora.generation.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"

encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


@dataclass(frozen=True)
class Echo:
    """A prompt as returned before its output. num_added: tokens before it that are not in its text."""

    text: str
    num_added: int = 0


@dataclass(frozen=True)
class Answers:
    """What a response is made of: n choices for each generation, one generation for each prompt.

    model: as the client named it. fingerprint: identifies model and adapter. name: suffix of the response's
    id. token_ids: include those of prompts and outputs. running_usage: every chunk has the usage so far.
    cached_tokens: the usage tells them.
    reply: how outputs are read; None: they are content.
    """

    generations: Sequence[Generation]
    n: int
    model: str
    fingerprint: str
    tokenizer: Tokenizer
    name: str = ""
    token_ids: bool = False
    running_usage: bool = False
    cached_tokens: bool = False
    reply: ReplyFormat | None = None
    expanded_prompt: str | None = None
    echoes: Sequence[Echo] = ()


class ResponseBuilder:
    """The response to one HTTP request, complete or as events."""

    prefix = object = chunk_object = ""
    media_type = "text/event-stream"  # of a stream

    def __init__(self, answers: Answers) -> None:
        self.id = f"{self.prefix}-{answers.name or secrets.token_hex(12)}"
        self.generations, self._shown = answers.generations, answers
        self._n, self._tokenizer = answers.n, answers.tokenizer
        named = {"model": answers.model, "system_fingerprint": answers.fingerprint}
        self._common: dict[str, Any] = {"created": int(time.time()), **named}
        self._tokens_sent: dict[int, int] = {}
        self._ended: set[int] = set()
        head = encode(self._envelope(self.chunk_object, []))
        self._chunk_start = "data: " + head.removesuffix("]}")  # equal in all chunks

    def body(self) -> dict[str, Any]:
        """The JSON of the complete response."""
        choices, num_output = [], 0
        for number, generation in enumerate(self.generations):
            for output in generation.report():
                num_output += 0 if generation.decoding.prompt_only else output.length
                choice = self._choice(generation, output)
                if self._shown.token_ids:
                    choice["token_ids"] = [] if generation.decoding.prompt_only else output.token_ids
                choice |= versions_of(output)
                choices.append({"index": number * self._n + output.index, **_ending(output), **choice})
        return self._envelope(self.object, choices) | {"usage": self._usage(num_output) | self._details()}

    def first_events(self) -> bytes:
        """Server-sent events before there is any output."""
        return b""

    def new_events(self) -> bytes:
        """Server-sent events for output since the last call: one chunk for each choice that has any."""
        chunks: list[str] = []
        for number, generation in enumerate(self.generations):
            # Whether all chunks of a choice except the last contain only text.
            text_only = generation.decoding.top is None and not self._shown.token_ids
            text_only = text_only and not generation.decoding.prompt_only
            for at, output in enumerate(generation.streamed_outputs):
                index = number * self._n + at
                if index in self._ended:
                    continue
                if text_only and output.finish_reason is None:  # true for nearly all chunks
                    text = output.advance()
                    if text:
                        self._tokens_sent[index] = len(output.token_ids)
                        chunks += self._text_events(index, text)
                    continue
                report = output.report(at, generation.decoding.logprobs, False)
                counted = generation.decoding.top is not None or self._shown.token_ids
                if (
                    report.finish_reason is not None
                    or report.text_diff
                    or (counted and report.token_ids_diff)
                ):
                    chunks += self._chunk(index, generation, report)
        return "".join(chunks).encode()

    def last_events(self, usage: bool) -> bytes:
        """Events that end a complete stream. usage: whether it was requested."""
        if not usage:
            return DONE
        last = self._envelope(self.chunk_object, []) | {"usage": self._usage_so_far()}
        return f"data: {encode(last)}\n\n".encode() + DONE

    def error_events(self, error: ApiError) -> bytes:
        """Events that end a failed stream."""
        return error.event() + DONE

    def _text_events(self, index: int, text: str) -> list[str]:
        return [self._event(self._text_delta(index, encode(text)))]

    def _text_delta(self, index: int, text: str) -> str:
        """A choice with only text, as JSON. text: encoded as JSON."""
        raise NotImplementedError

    def _chunk(self, index: int, generation: Generation, output: CompletionOutput) -> list[str]:
        start = self._tokens_sent.get(index, 0)
        self._tokens_sent[index] = output.length
        if output.finish_reason is not None:
            self._ended.add(index)
        deltas = self._deltas(index, generation, output, start)
        if self._shown.token_ids:
            deltas[-1]["token_ids"] = [] if generation.decoding.prompt_only else output.token_ids[start:]
        if output.finish_reason is not None and deltas:
            deltas[-1] |= versions_of(output)
        return [self._choice_event({"index": index, **delta}) for delta in deltas]

    def _choice_event(self, choice: dict[str, Any]) -> str:
        return self._event(encode(choice))

    def _event(self, choice: str, more: str = "") -> str:
        """choice: as JSON. more: further fields of the chunk, as JSON after a comma."""
        if self._shown.running_usage:
            more += f',"usage":{encode(self._usage(sum(self._tokens_sent.values())))}'
        return f"{self._chunk_start}{choice}]{more}}}\n\n"

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, **self._common, "choices": choices}

    def _of_prompt(self, generation: Generation) -> dict[str, Any]:
        """Fields about the prompt in a complete response."""
        found: dict[str, Any] = {}
        if self._shown.token_ids:
            found["prompt_token_ids"] = generation.prompt
        top, logits = generation.decoding.prompt_top, generation.context_logits
        if top is not None and logits is not None:
            found["prompt_logprobs"] = logprobs.ranked_logprobs(
                generation.prompt, logits, top, self._tokenizer
            )
        return found

    def _usage(self, num_output: int) -> dict[str, Any]:
        num_prompt = sum(len(generation.prompt) for generation in self.generations)
        counts = {"prompt_tokens": num_prompt, "completion_tokens": num_output}
        return {**counts, "total_tokens": num_prompt + num_output}

    def _usage_so_far(self) -> dict[str, Any]:
        """Of a stream."""
        return self._usage(sum(self._tokens_sent.values())) | self._details()

    def _details(self) -> dict[str, Any]:
        """Further fields of the usage of a complete response."""
        if not self._shown.cached_tokens:
            return {}
        cached = sum(one.metrics.cached_tokens for one in self.generations if one.metrics is not None)
        return {"prompt_tokens_details": {"cached_tokens": cached}}

    def _choice(self, generation: Generation, output: CompletionOutput) -> dict[str, Any]:
        raise NotImplementedError

    def _deltas(
        self, index: int, generation: Generation, output: CompletionOutput, start: int
    ) -> list[dict[str, Any]]:
        """The new deltas of a choice: none, one or several. start: tokens that were already sent."""
        raise NotImplementedError


class ChatResponse(ResponseBuilder):
    """A chat, with its reasoning and tool calls if there may be any."""

    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, answers: Answers) -> None:
        super().__init__(answers)
        self._reply = answers.reply
        self._readers: dict[int, ReplyReader] = {}

    def body(self) -> dict[str, Any]:
        expanded = self._shown.expanded_prompt
        more = {} if expanded is None else {"expanded_prompt": expanded}
        return super().body() | more | self._of_prompt(self.generations[0])

    def first_events(self) -> bytes:
        role = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        count = len(self.generations) * self._n
        more = f',"prompt_token_ids":{encode(self.generations[0].prompt)}' if self._shown.token_ids else ""
        return "".join(
            self._event(encode({"index": index, **role}), more if index == 0 else "")
            for index in range(count)
        ).encode()

    def _read(self, index: int, text: str, reason: str | None) -> list[Piece]:
        """What a text adds to a choice."""
        if self._reply is None:
            return [Piece("content", text)] if text else []
        reader = self._readers.setdefault(index, ReplyReader(self._reply))
        return reader.add(text, reason is not None, cut=reason == "length")

    def _end_reason(self, index: int, output: CompletionOutput) -> str | None:
        """A truncated output with calls keeps its own reason."""
        called = index in self._readers and self._readers[index].num_calls
        return "tool_calls" if called and output.finish_reason == "stop" else output.finish_reason

    def _text_events(self, index: int, text: str) -> list[str]:
        if self._reply is None:
            return super()._text_events(index, text)
        ending = {"logprobs": None, "finish_reason": None}
        return [
            self._event(self._text_delta(index, encode(piece.text)))
            if piece.kind == "content"
            else self._choice_event({"index": index, "delta": _delta(piece), **ending})
            for piece in self._read(index, text, None)
        ]

    def _details(self) -> dict[str, Any]:
        if self._reply is None or self._reply.thinking is None:
            return super()._details()
        count = 0
        for index, reader in self._readers.items():
            generation = self.generations[index // self._n]
            ids, rules = generation.streamed_outputs[index % self._n].token_ids, generation.decoding.rules
            stream, length = self._tokenizer.stream(rules.skip_special_tokens, rules.shown), 0
            for token in ids:
                if length >= reader.num_reasoning:
                    break
                length += len(stream.add([token], False))
                count += 1
        return super()._details() | {"completion_tokens_details": {"reasoning_tokens": count}}

    def _text_delta(self, index: int, text: str) -> str:
        return f'{{"index":{index},"delta":{{"content":{text}}},"logprobs":null,"finish_reason":null}}'

    def _choice(self, generation: Generation, output: CompletionOutput) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": output.text, "refusal": None}
        choice: dict[str, Any] = {"message": message, "logprobs": self._logprobs(generation, output, 0)}
        if self._reply is not None:
            index = self.generations.index(generation) * self._n + output.index
            found: dict[str, str] = {}
            calls: dict[int, dict[str, Any]] = {}
            for piece in self._read(index, output.text, output.finish_reason or "stop"):
                if piece.kind == "name":
                    calls[piece.call] = new_call(piece.text)
                elif piece.kind == "arguments":
                    calls[piece.call]["function"]["arguments"] += piece.text
                else:
                    found[piece.kind] = found.get(piece.kind, "") + piece.text
            nothing = None if calls or self._reply.only_calls or found else ""
            message["content"] = found.get("content", nothing)
            if "reasoning" in found:
                message["reasoning_content"] = message["reasoning"] = found["reasoning"]
            if calls:
                message["tool_calls"] = list(calls.values())
            choice["finish_reason"] = self._end_reason(index, output)
        return choice

    def _deltas(
        self, index: int, generation: Generation, output: CompletionOutput, start: int
    ) -> list[dict[str, Any]]:
        log_probs = {"logprobs": self._logprobs(generation, output, start)}
        pieces = self._read(index, output.text_diff, output.finish_reason)
        is_empty = not pieces and output.finish_reason is None and log_probs["logprobs"] is None
        if is_empty and not self._shown.token_ids:
            return []
        found: list[dict[str, Any]] = [
            {"delta": _delta(piece), "logprobs": None, "finish_reason": None} for piece in pieces
        ] or [{"delta": {}}]
        found[0] |= log_probs
        found[-1] |= _ending(output) | {"finish_reason": self._end_reason(index, output)}
        return found

    def _logprobs(
        self, generation: Generation, output: CompletionOutput, start: int
    ) -> dict[str, Any] | None:
        top = generation.decoding.top
        if top is None:
            return None
        found = logprobs.output_logprobs(output, generation.alternatives(output.index), start)
        return logprobs.chat_logprobs(found, self._tokenizer)


class TranslatedChat(ChatResponse):
    """A chat in the format of another API. A subclass makes finished events of texts and of choices."""

    def _event(self, choice: str, more: str = "") -> str:
        return choice


def named_event(type: str, **fields: Any) -> str:
    """A server-sent event with its type, also in the data."""
    return f"event: {type}\ndata: {encode({'type': type, **fields})}\n\n"


class CompletionResponse(ResponseBuilder):
    """A completion, after its prompt if that is echoed."""

    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, answers: Answers) -> None:
        super().__init__(answers)
        self._echoes = dict(zip(self.generations, answers.echoes, strict=False))
        self._to_echo = set(range(len(answers.echoes)))  # prompts that a stream has not sent yet
        self._offsets: dict[int, TextOffsets] = {}  # for the outputs of a stream

    def new_events(self) -> bytes:
        """A prompt is sent with its first output, because its log probabilities are known only then."""
        chunks = []
        for number in sorted(self._to_echo):
            generation = self.generations[number]
            if generation.started:
                self._to_echo.discard(number)
                log_probs = self._prompt_logprobs(generation)
                choice = {"text": self._echo(generation).text, "logprobs": log_probs, "finish_reason": None}
                chunks += [
                    self._event(encode({"index": number * self._n + i, **choice})) for i in range(self._n)
                ]
        return "".join(chunks).encode() + super().new_events()

    def _text_delta(self, index: int, text: str) -> str:
        return f'{{"index":{index},"text":{text},"logprobs":null,"finish_reason":null}}'

    def _echo(self, generation: Generation) -> Echo:
        return self._echoes.get(generation, Echo(""))

    def _choice(self, generation: Generation, output: CompletionOutput) -> dict[str, Any]:
        text = self._echo(generation).text + ("" if generation.decoding.prompt_only else output.text)
        log_probs = self._prompt_logprobs(generation)
        if generation.decoding.top is not None and not generation.decoding.prompt_only:
            offsets = self._offsets_of(generation)
            log_probs = logprobs.joined(log_probs, self._logprobs(generation, output, 0, offsets))
        return {"text": text, "logprobs": log_probs, **self._of_prompt(generation)}

    def _deltas(
        self, index: int, generation: Generation, output: CompletionOutput, start: int
    ) -> list[dict[str, Any]]:
        delta: dict[str, Any] = {"text": "", "logprobs": None, **_ending(output)}
        if self._shown.token_ids and start == 0:
            delta["prompt_token_ids"] = generation.prompt
        if not generation.decoding.prompt_only:
            offsets = self._offsets.setdefault(index, self._offsets_of(generation))
            log_probs = self._logprobs(generation, output, start, offsets)
            delta |= {"text": output.text_diff, "logprobs": log_probs}
        return [delta]

    def _logprobs(
        self, generation: Generation, output: CompletionOutput, start: int, offsets: TextOffsets
    ) -> dict[str, Any] | None:
        """For the output's tokens from `start` on."""
        top = generation.decoding.top
        if top is None:
            return None
        found = logprobs.output_logprobs(output, generation.alternatives(output.index), start)
        return logprobs.completion_logprobs(found, self._tokenizer, top, offsets)

    def _offsets_of(self, generation: Generation) -> TextOffsets:
        """For the tokens of an output, whose text may omit special tokens."""
        skips = generation.decoding.rules.skip_special_tokens
        return TextOffsets(self._tokenizer.stream(skips), len(self._echo(generation).text))

    def _prompt_logprobs(self, generation: Generation) -> dict[str, Any] | None:
        """For the prompt's tokens, if it is echoed."""
        top, logits = generation.decoding.top, generation.context_logits
        if top is None or logits is None or generation not in self._echoes:
            return None
        found = logprobs.prompt_logprobs(generation.prompt, logits, top)
        offsets = TextOffsets(self._tokenizer.stream(False), 0, self._echo(generation).num_added)
        return logprobs.completion_logprobs(found, self._tokenizer, top, offsets)


def new_call(name: str) -> dict[str, Any]:
    """A call of a message, without its arguments."""
    function = {"name": name, "arguments": ""}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def _delta(piece: Piece) -> dict[str, Any]:
    """Of a choice in a stream."""
    if piece.kind == "content":
        return {"content": piece.text}
    if piece.kind == "reasoning":
        return {"reasoning_content": piece.text, "reasoning": piece.text}
    if piece.kind == "name":
        return {"tool_calls": [{"index": piece.call, **new_call(piece.text)}]}
    return {"tool_calls": [{"index": piece.call, "function": {"arguments": piece.text}}]}


def versions_of(output: CompletionOutput) -> dict[str, Any]:
    """Which tokens were generated by which version of the adapter. Empty for the base model."""
    return {"lora_versions": [vars(one) for one in output.lora_versions]} if output.lora_versions else {}


def _ending(output: CompletionOutput) -> dict[str, Any]:
    found: dict[str, Any] = {"finish_reason": output.finish_reason}
    return found if output.stop_reason is None else found | {"stop_reason": output.stop_reason}


class RunningCalls:
    """The calls of one HTTP request. A client that disconnects cancels them."""

    def __init__(self, backend: Backend, calls: Sequence[Call[Any]], request: Request, names: Names) -> None:
        self._backend, self._calls, self._changed = backend, calls, calls[0].changed
        self._request, self._names = request, names
        self._streaming = self._disconnected = False

        def disconnected() -> None:
            self._disconnected = True
            self._changed.set()

        self._watcher = watch(request.receive, disconnected)

    async def begin(self) -> None:
        """Start, and wait for the first change: until then an error can still become an HTTP status."""
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
            self._streaming = error.status == 499
            yield builder.error_events(error)

    def close(self) -> None:
        if self._streaming:  # the stream is not complete
            self._backend.on_disconnect()
        self._watcher.cancel()
        failed = next((call.error for call in self._calls if call.error is not None), None)
        left = self._disconnected or (self._streaming and failed is None)
        status = 499 if left else 200 if failed is None else failed.status
        report(self._backend, self._calls, self._request, status, self._names)
        for call in self._calls:
            if not call.generation.ended:
                self._backend.cancel(call)

    async def _wait(self) -> None:
        """Wait for a change. Raises ApiError if a call failed or the client disconnected."""
        await self._changed.wait()
        self._changed.clear()
        if self._disconnected:
            raise client_left()
        for call in self._calls:
            if call.error is not None:
                raise call.error
