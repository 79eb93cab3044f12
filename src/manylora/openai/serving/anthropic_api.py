"""Anthropic's Messages API: /v1/messages runs a chat and answers in this API's format."""

from __future__ import annotations

import secrets
from functools import partial
from typing import Any

from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

from manylora.openai.api.anthropic_request import NAMES, CountTokensRequest, MessagesRequest, chat_request
from manylora.openai.api.errors import ERROR_TYPES, ApiError, renamed
from manylora.openai.serving.inference import Inference
from manylora.openai.serving.keys import ApiKey
from manylora.openai.serving.responses import Answers, ChatResponse, encode

TYPES = ERROR_TYPES | {413: "request_too_large", 503: "overloaded_error"}


async def answer_messages(
    inference: Inference, request: Request, body: MessagesRequest, key: ApiKey
) -> Response:
    """Raises ApiError."""
    chat = chat_request(body)
    asked = await inference.ask(chat, key)
    prompt = await asked.prompts.chat(chat)
    # Coding agents ask for as many tokens as their largest model can write.
    room = max(1, inference.limits.max_seq_len - len(prompt.ids))
    chat.max_tokens = min(body.max_tokens, room)
    build = partial(MessagesAnswer, body.max_tokens > room)
    return await inference.chat_from(request, chat, asked, prompt, build)


async def count_tokens(inference: Inference, body: CountTokensRequest, key: ApiKey) -> dict[str, int]:
    """Raises ApiError."""
    chat = chat_request(body)
    asked = await inference.ask(chat, key)
    return {"input_tokens": len((await asked.prompts.chat(chat)).ids)}


def error_body(error: ApiError) -> dict[str, Any]:
    error = renamed(error, NAMES)
    kind = TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


class MessagesAnswer(ChatResponse):
    """A message of blocks: a text, tool uses, or both. fills: it may be cut off by the context's end."""

    def __init__(self, fills: bool, answers: Answers) -> None:
        super().__init__(answers)
        self._length = "model_context_window_exceeded" if fills else "max_tokens"
        self.id = f"msg_{secrets.token_hex(12)}"
        self._blocks = 0  # that were begun
        self._open = ""  # what the open block is: text, or the index of a call in the chat; empty: none is
        self._ending: dict[str, Any] = {}

    def body(self) -> dict[str, Any]:
        chat = super().body()
        choice = chat["choices"][0]
        message, calls = choice["message"], choice["message"].get("tool_calls") or []
        content = [{"type": "text", "text": message["content"] or ""}] * bool(message["content"] or not calls)
        for call in calls:
            given = call["function"]["arguments"] or "{}"
            arguments = from_json(given, allow_partial=True)  # max_tokens may cut it off
            content.append(_tool_use(call) | {"input": arguments})
        usage = {"output_tokens": chat["usage"]["completion_tokens"]}
        return self._message(content, self._stop(choice), usage)

    def first_events(self) -> bytes:
        unknown = {"stop_reason": None, "stop_sequence": None}
        message = self._message([], unknown, {"output_tokens": 0})
        return (_event("message_start", message=message) + _event("ping")).encode()

    def last_events(self, usage: bool) -> bytes:
        """Always includes usage."""
        used = self._usage(sum(self._tokens_sent.values()))
        tokens = {"input_tokens": used["prompt_tokens"], "output_tokens": used["completion_tokens"]}
        ending = _event("message_delta", delta=self._ending, usage=tokens)
        return (ending + _event("message_stop")).encode()

    def error_events(self, error: ApiError) -> bytes:
        return _event(**error_body(error)).encode()

    def _text_delta(self, index: int, text: str) -> str:
        return self._begin("text", {"type": "text", "text": ""}) + self._delta(f'"text_delta","text":{text}')

    def _event(self, choice: str, more: str = "") -> str:
        return choice  # `_text_delta` has already made it events

    def _choice_event(self, choice: dict[str, Any]) -> str:
        delta, events = choice["delta"], []
        if delta.get("content"):
            events.append(self._text_delta(0, encode(delta["content"])))
        for call in delta.get("tool_calls") or ():
            function = call.get("function", {})
            events.append(self._begin(str(call["index"]), _tool_use(call) if "id" in call else {}))
            if function.get("arguments"):
                part = encode(function["arguments"])
                events.append(self._delta(f'"input_json_delta","partial_json":{part}'))
        if choice.get("finish_reason") is not None:
            self._ending = self._stop(choice)
            if not self._blocks:
                events.append(self._begin("text", {"type": "text", "text": ""}))
            events.append(self._end())
        return "".join(events)

    def _begin(self, what: str, block: dict[str, Any]) -> str:
        """Begin a block, unless it is the open one."""
        if self._open == what:
            return ""
        ended, self._open = self._end(), what
        self._blocks += 1
        return ended + _event("content_block_start", index=self._blocks - 1, content_block=block)

    def _end(self) -> str:
        if not self._open:
            return ""
        self._open = ""
        return _event("content_block_stop", index=self._blocks - 1)

    def _delta(self, fields: str) -> str:
        """fields: the delta's type and the fields after it, as JSON."""
        return (
            'event: content_block_delta\ndata: {"type":"content_block_delta",'
            f'"index":{self._blocks - 1},"delta":{{"type":{fields}}}}}\n\n'
        )

    def _stop(self, choice: dict[str, Any]) -> dict[str, Any]:
        word = choice.get("stop_reason")
        if isinstance(word, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": word}
        reasons = {"length": self._length, "tool_calls": "tool_use"}
        return {"stop_reason": reasons.get(choice["finish_reason"], "end_turn"), "stop_sequence": None}

    def _message(
        self, content: list[dict[str, Any]], stop: dict[str, Any], usage: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._common["model"],
            "content": content,
            **stop,
            "usage": {"input_tokens": self._usage(0)["prompt_tokens"], **usage},
        }


def _event(type: str, **fields: Any) -> str:
    """A server-sent event."""
    return f"event: {type}\ndata: {encode({'type': type, **fields})}\n\n"


def _tool_use(call: dict[str, Any]) -> dict[str, Any]:
    """call: of a chat. Its arguments follow."""
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}
