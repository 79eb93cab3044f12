"""Response bodies of completions and chats, whole and as server-sent events."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

from manylora.llmapi.outputs import CompletionOutput
from manylora.openai.api.logprobs import chat_logprobs, completion_logprobs, output_logprobs, prompt_logprobs
from manylora.openai.api.tools import Calls, ToolCallParser, ToolUse
from manylora.openai.serving.generation import GenerationState
from manylora.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"

encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class ResponseBuilder:
    """The response to one HTTP request: n choices for each generation, one generation for each prompt.

    model: as the client named it. fingerprint: identifies the base model and the adapter's content.
    """

    prefix = object = chunk_object = ""

    def __init__(
        self,
        generations: Sequence[GenerationState],
        n: int,
        model: str,
        fingerprint: str,
        tokenizer: Tokenizer,
    ) -> None:
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self.generations = generations
        self._n, self._tokenizer = n, tokenizer
        self._common = {"created": int(time.time()), "model": model, "system_fingerprint": fingerprint}
        self._tokens_sent: dict[int, int] = {}
        self._ended: set[int] = set()
        head = encode(self._envelope(self.chunk_object, []))
        self._chunk_start = "data: " + head.removesuffix("]}")  # the same in all chunks

    def body(self) -> dict[str, Any]:
        """The JSON of the complete response."""
        choices, num_output = [], 0
        for number, generation in enumerate(self.generations):
            for output in generation.report():
                num_output += 0 if generation.plan.prompt_only else output.length
                choice = self._choice(generation, output)
                choices.append({"index": number * self._n + output.index, **_ending(output), **choice})
        return self._envelope(self.object, choices) | {"usage": self._usage(num_output)}

    def first_events(self) -> bytes:
        """Server-sent events before there is any output."""
        return b""

    def new_events(self) -> bytes:
        """Server-sent events for output since the last call: one chunk for each choice that has some."""
        chunks: list[str] = []
        for number, generation in enumerate(self.generations):
            text_only = self._is_text_only(generation)
            for at, output in enumerate(generation.streamed_outputs):
                index = number * self._n + at
                if index in self._ended:
                    continue
                if text_only and output.finish_reason is None:  # nearly all chunks are these
                    text = output.advance()
                    if text:
                        self._tokens_sent[index] = len(output.token_ids)
                        chunks.append(self._event(self._text_delta(index, encode(text))))
                    continue
                report = output.report(at, generation.plan.decoding.logprobs, False)
                if self._has_output(generation, report):
                    chunks += self._chunk(index, generation, report)
        return "".join(chunks).encode()

    def usage_event(self) -> bytes:
        """The last chunk, for stream_options.include_usage."""
        usage = {"usage": self._usage(sum(self._tokens_sent.values()))}
        return f"data: {encode(self._envelope(self.chunk_object, []) | usage)}\n\n".encode()

    def _is_text_only(self, generation: GenerationState) -> bool:
        """Whether all chunks of a choice but the last have only text."""
        return generation.plan.top is None and not generation.plan.prompt_only

    def _text_delta(self, index: int, text: str) -> str:
        """A choice with only text, as JSON. text: encoded as JSON."""
        raise NotImplementedError

    def _has_output(self, generation: GenerationState, output: CompletionOutput) -> bool:
        if output.finish_reason is not None or output.text_diff:
            return True
        return bool(generation.plan.top is not None and output.token_ids_diff)

    def _chunk(self, index: int, generation: GenerationState, output: CompletionOutput) -> list[str]:
        start = self._tokens_sent.get(index, 0)
        self._tokens_sent[index] = output.length
        if output.finish_reason is not None:
            self._ended.add(index)
        deltas = self._deltas(index, generation, output, start)
        return [self._event(encode({"index": index, **delta})) for delta in deltas]

    def _event(self, choice: str) -> str:
        """choice: as JSON."""
        return f"{self._chunk_start}{choice}]}}\n\n"

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, **self._common, "choices": choices}

    def _usage(self, num_output: int) -> dict[str, Any]:
        num_prompt = sum(len(generation.prompt) for generation in self.generations)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
        }

    def _choice(self, generation: GenerationState, output: CompletionOutput) -> dict[str, Any]:
        raise NotImplementedError

    def _deltas(
        self, index: int, generation: GenerationState, output: CompletionOutput, start: int
    ) -> list[dict[str, Any]]:
        """What is new in a choice: no delta, one or several. start: tokens that were sent already."""
        raise NotImplementedError


class ChatResponse(ResponseBuilder):
    """use: the tools that the model may call. expanded_prompt: the chat template's text, if asked for."""

    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self, *arguments: Any, use: ToolUse | None = None, expanded_prompt: str | None = None
    ) -> None:
        super().__init__(*arguments)
        self._use, self._expanded_prompt = use, expanded_prompt
        self._parsers: dict[int, ToolCallParser] = {}

    def body(self) -> dict[str, Any]:
        expanded = self._expanded_prompt
        return super().body() | ({} if expanded is None else {"expanded_prompt": expanded})

    def first_events(self) -> bytes:
        role = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        count = len(self.generations) * self._n
        return "".join(self._event(encode({"index": index, **role})) for index in range(count)).encode()

    def _is_text_only(self, generation: GenerationState) -> bool:
        return self._use is None and super()._is_text_only(generation)

    def _text_delta(self, index: int, text: str) -> str:
        return f'{{"index":{index},"delta":{{"content":{text}}},"logprobs":null,"finish_reason":null}}'

    def _choice(self, generation: GenerationState, output: CompletionOutput) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": output.text, "refusal": None}
        choice: dict[str, Any] = {"message": message, "logprobs": self._logprobs(generation, output, 0)}
        if self._use is not None:
            content, calls = ToolCallParser(self._use).add(output.text, final=True)
            if calls:
                message |= {"content": content or None, "tool_calls": calls}
                choice["finish_reason"] = _finish_reason(output)
        return choice

    def _deltas(
        self, index: int, generation: GenerationState, output: CompletionOutput, start: int
    ) -> list[dict[str, Any]]:
        log_probs = {"logprobs": self._logprobs(generation, output, start)}
        no_calls: Calls = []
        content, calls = output.text_diff, no_calls
        if self._use is not None:
            parser = self._parsers.setdefault(index, ToolCallParser(self._use))
            content, calls = parser.add(content, output.finish_reason is not None)
        ending = _ending(output)
        if calls:
            ending["finish_reason"] = _finish_reason(output)
            delta = {"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]}
            first = {"delta": {"content": content} if content else {}, **log_probs}
            content_chunk = [{**first, "finish_reason": None}] if content else []
            return [*content_chunk, {"delta": delta, **({} if content else log_probs), **ending}]
        if not content and output.finish_reason is None and log_probs["logprobs"] is None:
            return []
        return [{"delta": {"content": content} if content else {}, **log_probs, **ending}]

    def _logprobs(
        self, generation: GenerationState, output: CompletionOutput, start: int
    ) -> dict[str, Any] | None:
        top = generation.plan.top
        if top is None:
            return None
        found = output_logprobs(output, generation.alternatives(output.index), start)
        return chat_logprobs(found, self._tokenizer)


class CompletionResponse(ResponseBuilder):
    """echoes: the texts of the prompts, where they are returned before the output."""

    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, *arguments: Any, echoes: Sequence[str] | None = None) -> None:
        super().__init__(*arguments)
        self._echoes = echoes
        self._to_echo = set(range(len(echoes or ())))  # prompts that a stream has not sent yet

    def new_events(self) -> bytes:
        """A prompt is sent with its first output: only then its log probabilities are known."""
        chunks = []
        for number in sorted(self._to_echo):
            generation = self.generations[number]
            if generation.started:
                self._to_echo.discard(number)
                log_probs = self._prompt_logprobs(generation)
                choice = {"text": self._echo(generation), "logprobs": log_probs, "finish_reason": None}
                chunks += [
                    self._event(encode({"index": number * self._n + i, **choice})) for i in range(self._n)
                ]
        return "".join(chunks).encode() + super().new_events()

    def _text_delta(self, index: int, text: str) -> str:
        return f'{{"index":{index},"text":{text},"logprobs":null,"finish_reason":null}}'

    def _echo(self, generation: GenerationState) -> str:
        if self._echoes is None:
            return ""
        return self._echoes[list(self.generations).index(generation)]

    def _choice(self, generation: GenerationState, output: CompletionOutput) -> dict[str, Any]:
        prompt_only = generation.plan.prompt_only
        text = self._echo(generation) + ("" if prompt_only else output.text)
        return {"text": text, "logprobs": self._logprobs(generation, output, 0, whole=True)}

    def _deltas(
        self, index: int, generation: GenerationState, output: CompletionOutput, start: int
    ) -> list[dict[str, Any]]:
        text = "" if generation.plan.prompt_only else output.text_diff
        log_probs = None
        if not generation.plan.prompt_only:
            log_probs = self._logprobs(generation, output, start, whole=False)
        return [{"text": text, "logprobs": log_probs, **_ending(output)}]

    def _logprobs(
        self, generation: GenerationState, output: CompletionOutput, start: int, *, whole: bool
    ) -> dict[str, Any] | None:
        top = generation.plan.top
        if top is None:
            return None
        found = []
        if whole and generation.context_logits is not None:
            found = prompt_logprobs(generation.prompt, generation.context_logits, top)
        if not generation.plan.prompt_only:
            found += output_logprobs(output, generation.alternatives(output.index), start)
        before = 0 if whole else len(self._echo(generation)) + len(output.text) - len(output.text_diff)
        return completion_logprobs(found, self._tokenizer, top, before)

    def _prompt_logprobs(self, generation: GenerationState) -> dict[str, Any] | None:
        top = generation.plan.top
        if top is None or generation.context_logits is None:
            return None
        found = prompt_logprobs(generation.prompt, generation.context_logits, top)
        return completion_logprobs(found, self._tokenizer, top)


def _finish_reason(output: CompletionOutput) -> str | None:
    """Of a choice with tool calls. An output that was cut off keeps its own reason."""
    return "tool_calls" if output.finish_reason == "stop" else output.finish_reason


def _ending(output: CompletionOutput) -> dict[str, Any]:
    found: dict[str, Any] = {"finish_reason": output.finish_reason}
    return found if output.stop_reason is None else found | {"stop_reason": output.stop_reason}
