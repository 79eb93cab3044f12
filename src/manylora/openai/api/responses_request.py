"""The body of /v1/responses, and its conversion to a chat."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from manylora.openai.api.errors import ApiError, invalid_value, renamed, unsupported_field
from manylora.openai.api.parsing import api_error, validate
from manylora.openai.api.schema import (
    MAX_TOKENS,
    Body,
    ChatRequest,
    GenerationRequest,
    Items,
    TemplateFields,
    Text,
)

MAX_ITEMS = 4096
STATELESS = {
    "previous_response_id": "this server does not store responses: send the earlier items in input",
    "conversation": "this server does not store conversations: send the earlier items in input",
    "prompt": "this server does not store prompts: send the text in instructions and input",
    "context_management": "context compaction is not supported: send fewer items, or truncation auto",
    "background": "background responses are not supported: leave it out, or set stream",
    "moderation": "moderation is not supported: leave it out",
}
"""Fields that need a feature this server does not have, with what to do instead."""
CHAT_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Fields of a chat as named in errors, to the names in this API."""
PASSED = set(GenerationRequest.model_fields) | set(TemplateFields.model_fields)
NOT_SHOWN = {"n": 1, "prompt_logprobs": None, "return_token_ids": False}
"""Fields of chats that ask for several outputs, or for parts that a response does not have."""
LOGPROBS = "message.output_text.logprobs"


class _TextFormat(Body):
    """json_schema needs schema. name, description and strict are only for the caller."""

    type: Literal["text", "json_object", "json_schema"]
    name: Text | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class _TextConfig(Body):
    format: _TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # without effect


class _Tool(Body):
    """parameters: JSON schema of an object. strict: arguments must match it."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesRequest(TemplateFields, GenerationRequest):
    """input: a text, or items. Fields of chats that this API does not have work as they do in chats.

    store: remember the items of the answer for a while. No effect: text.verbosity, and fields for tools and
    caches of OpenAI's servers.
    """

    input: str | Items[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    text: _TextConfig | None = None
    tools: Items[dict[str, Any]] = Field([], max_length=128)
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    top_logprobs: int = Field(0, ge=0, le=20)
    include: Items[
        Literal[
            "message.output_text.logprobs",
            "reasoning.encrypted_content",
            "file_search_call.results",
            "web_search_call.results",
            "web_search_call.action.sources",
            "message.input_image.image_url",
            "computer_call_output.output.image_url",
            "code_interpreter_call.outputs",
        ]
    ] = Field([], max_length=16)
    truncation: Literal["auto", "disabled"] = "disabled"
    background: bool = False
    store: bool = True
    reasoning: dict[str, Any] | None = None
    max_tool_calls: int | None = Field(None, ge=1, le=MAX_TOKENS)
    prompt_cache_options: dict[str, Any] | None = None
    previous_response_id: Text | None = None
    conversation: Text | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    context_management: Items[dict[str, Any]] | None = None
    moderation: dict[str, Any] | None = None


class _Item(BaseModel):
    """An item, perhaps from the answer of another server. Fields that carry nothing for the model are
    dropped.
    """

    model_config = ConfigDict(extra="ignore", strict=True)


class _Part(_Item):
    """A part of a text. A refusal is a text that the model gave instead of an answer."""

    type: Literal["input_text", "output_text", "text", "refusal"]
    text: str | None = None
    refusal: str | None = None


class _MessageItem(_Item):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Items[dict[str, Any]]


class _CallItem(_Item):
    call_id: Text = Field(min_length=1)
    name: str
    arguments: str


class _OutputItem(_Item):
    call_id: Text = Field(min_length=1)
    output: str | Items[dict[str, Any]]


def chat_request(body: ResponsesRequest) -> ChatRequest:
    """Raises ApiError with this API's field names."""
    for name, reason in STATELESS.items():
        if getattr(body, name):
            raise unsupported_field(f"{name} is not supported: {reason}", name)
    for name, usual in NOT_SHOWN.items():
        if getattr(body, name) != usual:
            raise unsupported_field(f"{name} is not supported: a response has no place for it", name)
    passed = body.model_fields_set & PASSED
    chat = body.model_dump(include=passed, exclude_unset=True, by_alias=True)
    chat |= {
        "messages": _messages(body),
        "parallel_tool_calls": body.parallel_tool_calls,
        "max_completion_tokens": body.max_output_tokens,
        "response_format": _response_format(body) or chat.get("response_format"),
        "logprobs": LOGPROBS in body.include or body.top_logprobs > 0,
        "top_logprobs": body.top_logprobs,
        "reasoning_effort": (body.reasoning or {}).get("effort"),
    }
    if body.tools or body.tool_choice not in ("auto", "none"):
        chat |= {"tools": [_tool(one, f"tools.{i}") for i, one in enumerate(body.tools)]}
        chat |= {"tool_choice": _tool_choice(body.tool_choice)}
    try:
        return validate(chat, ChatRequest)
    except ApiError as error:
        raise in_words_of_responses(error) from error


def in_words_of_responses(error: ApiError) -> ApiError:
    """An error of the underlying chat, with this API's field names."""
    given = error.param or ""
    if given.startswith("messages."):  # the index of a message is not the index of its item
        message = error.message.replace(given, "messages", 1)
        error = ApiError(error.status, error.code, message, "messages", error.retry_after)
    return renamed(error, CHAT_NAMES)


def _response_format(body: ResponsesRequest) -> dict[str, Any] | None:
    wanted = body.text.format if body.text is not None else None
    if wanted is None:
        return None
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    if wanted.json_schema is None:
        raise ApiError(400, "missing_field", "text.format.schema is required", "text.format.schema")
    return {"type": "json_schema", "json_schema": {"name": wanted.name, "schema": wanted.json_schema}}


def _tool(given: dict[str, Any], where: str) -> dict[str, Any]:
    kind = str(given.get("type"))[:50]
    if kind != "function":
        reason = f"{where}: {kind!r} is no tool of this server: leave it out, or give a function that does it"
        raise unsupported_field(reason, where)
    tool = _checked(given, _Tool, where)
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}


def _tool_choice(given: str | dict[str, Any]) -> str | dict[str, Any]:
    """tool_choice in the form that chats use."""
    if isinstance(given, str):
        return given
    if given.get("type") == "allowed_tools":
        allowed = given.get("tools")
        if not isinstance(allowed, list) or not all(isinstance(one, dict) for one in allowed):
            raise invalid_value("tool_choice.tools must be a list of tools", "tool_choice")
        tools = [_tool_choice({"type": "function", **one}) for one in allowed]
        return {"type": "allowed_tools", "allowed_tools": {"mode": given.get("mode"), "tools": tools}}
    if given.get("type") != "function":
        kind = str(given.get("type"))[:50]
        reason = f"tool_choice: {kind!r} is no tool of this server: name a function, or leave it out"
        raise unsupported_field(reason, "tool_choice")
    return {"type": "function", "function": {"name": given.get("name")}}


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    """Messages as in a chat. Consecutive calls, and an assistant's text before them, become one message."""
    found: list[dict[str, Any]] = []
    if body.instructions:
        found.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*found, {"role": "user", "content": body.input}]
    if len(body.input) > MAX_ITEMS:
        raise invalid_value(f"input: at most {MAX_ITEMS} items", "input")
    for number, item in enumerate(body.input):
        where = f"input.{number}"
        given = {name: value for name, value in item.items() if value is not None}
        kind = given.get("type", "message" if "role" in given else "item_reference")
        if kind == "message":
            message = _checked(given, _MessageItem, where)
            found.append({"role": message.role, "content": _text(message.content, f"{where}.content")})
        elif kind == "function_call":
            _add_call(found, _checked(given, _CallItem, where))
        elif kind == "function_call_output":
            output = _checked(given, _OutputItem, where)
            text = _text(output.output, f"{where}.output")
            found.append({"role": "tool", "tool_call_id": output.call_id, "content": text})
        elif kind == "item_reference":
            reason = f"{where}: this server no longer has that item: send the item itself"
            raise unsupported_field(reason, where)
        elif kind != "reasoning":  # reasoning is not shown to the model again
            reason = f"{where}: items of type {str(kind)[:50]!r} are not supported: leave it out"
            raise unsupported_field(reason, where)
    if not found:
        raise invalid_value("input: there is none", "input")
    return found


def _add_call(found: list[dict[str, Any]], item: _CallItem) -> None:
    if not found or found[-1]["role"] != "assistant":
        found.append({"role": "assistant"})
    function = {"name": item.name, "arguments": item.arguments}
    found[-1].setdefault("tool_calls", []).append({"id": item.call_id, "function": function})


def _text(content: str | list[dict[str, Any]], where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for number, given in enumerate(content):
        kind = str(given.get("type"))[:50]
        if kind in ("input_image", "input_file", "input_audio", "image_url"):
            place = f"{where}.{number}"
            raise unsupported_field(f"{place}: {kind} is not supported: this server takes text", place)
        part = _checked(given, _Part, f"{where}.{number}")
        texts.append(part.text if part.text is not None else part.refusal or "")
    return "\n".join(texts)


def _checked(given: dict[str, Any], kind: type[Any], where: str) -> Any:
    try:
        return kind.model_validate({name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        raise api_error(error, where) from error
