"""Anthropic's Messages API: /v1/messages runs a chat and answers in this API's format."""

from __future__ import annotations

import json
import secrets
from datetime import datetime, timezone
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, create_model, model_validator
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from manylora.doors.http.api.errors import ERROR_TYPES, FORMAT, ApiError, renamed
from manylora.doors.http.api.parsing import validate
from manylora.doors.http.api.schema import (
    MAX_TOKENS,
    Body,
    ChatRequest,
    Items,
    Text,
    WordText,
    sampling_fields,
    thinking_variables,
)
from manylora.doors.http.serving.inference import Inference
from manylora.doors.http.serving.keys import ApiKey
from manylora.doors.http.serving.prompts import TOO_LONG
from manylora.doors.http.serving.responses import Answers, TranslatedChat, encode, named_event

EMPTY = {"type": "text", "text": ""}
THREAD_NOT_FOUND = "thread_not_found"
THOUGHT = {"type": "thinking", "thinking": "", "signature": ""}
TYPES = ERROR_TYPES | {413: "request_too_large", 503: "overloaded_error"}
# This API's names for fields of chats.
NAMES = {"stop": "stop_sequences", FORMAT: "output_config", "chat_template_kwargs": "thinking"}


class _Block(Body):
    """cache_control has no effect: prompts are always cached."""

    cache_control: dict[str, Any] | None = None


class TextBlock(_Block):
    type: Literal["text"]
    text: str
    citations: Items[dict[str, Any]] = Field([], max_length=0)


class ThinkingBlock(_Block):
    """signature and data have no effect."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: str = ""
    signature: str = ""
    data: str = ""


class ToolUseBlock(_Block):
    type: Literal["tool_use"]
    id: Text
    name: str = Field(min_length=1, max_length=128)
    input: dict[str, Any]
    caller: dict[str, Any] | None = None
    toolset_name: Text | None = None


class ToolResultBlock(_Block):
    """is_error has no effect: the content says what went wrong."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: str | Items[TextBlock] = ""
    is_error: bool = False
    toolset_name: Text | None = None


Block = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class AnthropicMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[Items[Block], Field(max_length=4096)]


class AnthropicTool(_Block):
    """A function of the client. eager_input_streaming and input_examples have no effect."""

    type: Literal["custom"] = "custom"
    name: str = Field(pattern="^[A-Za-z0-9_.-]{1,128}$")
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool = False
    eager_input_streaming: bool | None = None
    input_examples: Items[dict[str, Any]] = Field([])
    allowed_callers: Items[Literal["direct"]] | None = None
    defer_loading: Literal[False] = False


class ToolChoice(Body):
    """name: of the tool, for type tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _has_name(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("type tool needs the name of a tool, and no other type takes one")
        return self


class Thinking(Body):
    """budget_tokens has no effect. display: omitted: the blocks are empty."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    display: Text | None = None


class _JsonFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """effort has no effect."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: _JsonFormat | None = None


class _Turns(Body):
    type: Literal["thinking_turns", "all"]
    value: int | None = Field(None, ge=1, le=MAX_TOKENS)


class _ClearThinking(Body):
    """keep: thinking_turns: only the last ones of the assistant's messages show their thinking blocks."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | _Turns = "all"


class ContextManagement(Body):
    edits: Items[_ClearThinking] = Field([], max_length=1)

    @property
    def turns_kept(self) -> int:
        keep = self.edits[0].keep if self.edits else "all"
        return MAX_TOKENS if keep == "all" or keep.value is None else keep.value


class Thread(Body):
    """Tool runners of the SDKs send it. Nothing is stored here: they are told to send the whole chat."""

    type: Literal["create", "continue"]
    previous_message_id: Text = ""


class CountTokensRequest(Body):
    """What makes the prompt. model: the base model, an adapter or an alias."""

    model: str = Field(min_length=1, max_length=512)
    messages: Items[AnthropicMessage] = Field(min_length=1, max_length=4096)
    system: str | Annotated[Items[TextBlock], Field(max_length=4096)] = ""
    tools: Items[AnthropicTool] = Field([], max_length=128)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    cache_control: dict[str, Any] | None = None


if TYPE_CHECKING:
    SamplingFields = Body
else:
    SamplingFields = create_model("SamplingFields", __base__=Body, **sampling_fields("anthropic"))


class MessagesRequest(CountTokensRequest, SamplingFields):
    """metadata, but for its user_id, service_tier, speed and inference_geo have no effect."""

    max_tokens: int = Field(ge=1, le=MAX_TOKENS)
    stop_sequences: Items[WordText] = Field([], max_length=16)
    stream: bool = False
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    speed: Literal["standard", "fast"] | None = None
    inference_geo: Text | None = None
    thread: Thread | None = None


def chat_request(body: CountTokensRequest) -> ChatRequest:
    """Raises ApiError."""
    chat: dict[str, Any] = {"model": body.model, "messages": _messages(body)}
    if body.messages[-1].role == "assistant":  # the output continues it
        chat["continue_final_message"] = True
    thinks = body.thinking is not None and body.thinking.type != "disabled"
    chat["include_reasoning"] = thinks  # as in Anthropic's API, it is shown to those who ask for it
    if body.thinking is not None:
        chat["chat_template_kwargs"] = thinking_variables(thinks)
    tools = [
        {"name": one.name, "parameters": one.input_schema, "strict": one.strict}
        | {"description": one.description or ""}
        for one in body.tools
    ]
    chat["tools"] = [{"type": "function", "function": tool} for tool in tools]
    if (choice := body.tool_choice) is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        kinds = {"auto": "auto", "any": "required", "tool": named, "none": "none"}
        parallel = not choice.disable_parallel_tool_use
        chat |= {"tool_choice": kinds[choice.type], "parallel_tool_calls": parallel}
    if body.output_config is not None and body.output_config.format is not None:
        schema = body.output_config.format.schema_
        chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}
    if isinstance(body, MessagesRequest):
        if body.thread is not None and body.thread.type == "continue":
            reason = "thread: this server does not store threads: send all messages with type create"
            raise ApiError(404, THREAD_NOT_FOUND, reason, "thread")
        user = (body.metadata or {}).get("user_id")
        chat["user"] = user[:512] if isinstance(user, str) else None
        chat |= {"max_tokens": body.max_tokens, "stop": body.stop_sequences, "stream": body.stream}
        given = body.model_fields_set & SamplingFields.model_fields.keys()  # else the model's defaults apply
        chat |= {name: getattr(body, name) for name in given}
    return validate(chat, ChatRequest)


def _messages(body: CountTokensRequest) -> list[dict[str, Any]]:
    """A message's tool results come first, then its text."""
    turns = sum(message.role == "assistant" for message in body.messages)
    kept = MAX_TOKENS if body.context_management is None else body.context_management.turns_kept
    found = [{"role": "system", "content": _text(body.system)}] if body.system else []
    for message in body.messages:
        blocks = [] if isinstance(message.content, str) else message.content
        for block in blocks:
            if isinstance(block, ToolResultBlock):
                result = {"tool_call_id": block.tool_use_id, "content": _text(block.content)}
                found.append({"role": "tool", **result})
        calls = [
            {"id": one.id, "function": {"name": one.name, "arguments": json.dumps(one.input)}}
            for one in blocks
            if isinstance(one, ToolUseBlock)
        ]
        texts = [one for one in blocks if isinstance(one, TextBlock)]
        shown: dict[str, Any] = {"role": message.role, "content": _text(texts if blocks else message.content)}
        if calls:
            shown["tool_calls"] = calls
        thoughts = [one.thinking for one in blocks if isinstance(one, ThinkingBlock) and one.thinking]
        if thoughts and turns <= kept:
            shown["reasoning_content"] = "\n".join(thoughts)
        turns -= message.role == "assistant"
        if texts or calls or not any(isinstance(one, ToolResultBlock) for one in blocks):
            found.append(shown)
    return found


def _text(content: Any) -> str:
    """content: a text, or blocks of text."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


async def answer_messages(
    inference: Inference, request: Request, body: MessagesRequest, key: ApiKey
) -> Response:
    """Raises ApiError."""
    # Coding agents ask for as many tokens as their largest model can write.
    return await inference.chat(request, chat_request(body), key, partial(MessagesAnswer, body), caps=True)


async def count_tokens(
    inference: Inference, request: Request, body: CountTokensRequest, key: ApiKey
) -> Response:
    """Raises ApiError."""
    chat = chat_request(body)
    asked = await inference.ask(chat, key)
    return JSONResponse({"input_tokens": len((await asked.prompts.chat(chat)).ids)})


def error_body(error: ApiError) -> dict[str, Any]:
    error = renamed(error, NAMES)
    kind = TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    found: dict[str, Any] = {"type": kind, "message": error.message}
    if error.code == TOO_LONG:  # coding agents look for these words, and then summarise the chat
        found["message"] = f"prompt is too long: {error.message}"
    if error.code == THREAD_NOT_FOUND:
        found["details"] = {"error_code": error.code}
    return {"type": "error", "error": found}


def model_list(cards: list[dict[str, Any]]) -> dict[str, Any]:
    """cards: as OpenAI has them."""
    ids = [card["id"] for card in cards]
    data = [model_info(card) for card in cards]
    return {
        "data": data,
        "has_more": False,
        "first_id": ids[0] if ids else None,
        "last_id": (ids or [None])[-1],
    }


def model_info(card: dict[str, Any]) -> dict[str, Any]:
    created = datetime.fromtimestamp(card["created"], timezone.utc).isoformat().replace("+00:00", "Z")
    return card | {"type": "model", "display_name": card["id"], "created_at": created}


class MessagesAnswer(TranslatedChat):
    """A message of blocks: thinking, a text, tool uses."""

    def __init__(self, asked: MessagesRequest, answers: Answers) -> None:
        super().__init__(answers)
        self._omits = asked.thinking is not None and asked.thinking.display == "omitted"
        fills = asked.max_tokens > answers.generations[0].decoding.params.max_tokens  # the context
        self._length = "model_context_window_exceeded" if fills else "max_tokens"
        self.id = f"msg_{secrets.token_hex(12)}"
        self._blocks = 0  # that were begun
        self._open = ""  # the open block: text, thinking, or the index of a call in the chat; empty: none is
        self._ending: dict[str, Any] = {}

    def body(self) -> dict[str, Any]:
        chat = super().body()
        choice = chat["choices"][0]
        message, calls = choice["message"], choice["message"].get("tool_calls") or []
        content: list[dict[str, Any]] = []
        if thought := message.get("reasoning"):
            content.append(THOUGHT | {"thinking": "" if self._omits else thought})
        if message["content"] or not calls:
            content.append({"type": "text", "text": message["content"] or ""})
        for call in calls:
            given = call["function"]["arguments"] or "{}"
            arguments = from_json(given, allow_partial=True)  # max_tokens may cut it off
            content.append(_tool_use(call) | {"input": arguments})
        usage = {"output_tokens": chat["usage"]["completion_tokens"]}
        return self._message(content, self._stop(choice), usage)

    def first_events(self) -> bytes:
        unknown = {"stop_reason": None, "stop_sequence": None}
        message = self._message([], unknown, {"output_tokens": 0})
        return (named_event("message_start", message=message) + named_event("ping")).encode()

    def last_events(self, usage: bool) -> bytes:
        """Always includes usage."""
        used = self._usage_so_far()
        tokens = {"input_tokens": used["prompt_tokens"], "output_tokens": used["completion_tokens"]}
        ending = named_event("message_delta", delta=self._ending, usage=tokens)
        return (ending + named_event("message_stop")).encode()

    def error_events(self, error: ApiError) -> bytes:
        return named_event(**error_body(error)).encode()

    def _text_delta(self, index: int, text: str) -> str:
        return self._begin("text", EMPTY) + self._delta(f'"text_delta","text":{text}')

    def _choice_event(self, choice: dict[str, Any]) -> str:
        delta, events = choice["delta"], []
        if delta.get("reasoning"):
            events.append(self._begin("thinking", THOUGHT))
            if not self._omits:
                events.append(self._delta(f'"thinking_delta","thinking":{encode(delta["reasoning"])}'))
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
                events.append(self._begin("text", EMPTY))
            events.append(self._end())
        return "".join(events)

    def _begin(self, what: str, block: dict[str, Any]) -> str:
        """Begin a block, unless it is the open one."""
        if self._open == what:
            return ""
        ended, self._open = self._end(), what
        self._blocks += 1
        return ended + named_event("content_block_start", index=self._blocks - 1, content_block=block)

    def _end(self) -> str:
        if not self._open:
            return ""
        self._open = ""
        return named_event("content_block_stop", index=self._blocks - 1)

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


def _tool_use(call: dict[str, Any]) -> dict[str, Any]:
    """call: of a chat. Its arguments follow."""
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}
