"""/v1/responses: runs a chat and returns its answer in this API's format, complete or as events."""

from __future__ import annotations

import json
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from manylora.doors.http.api import schema
from manylora.doors.http.api.errors import ApiError, invalid_value, renamed, unsupported_field
from manylora.doors.http.api.parsing import api_error, validate
from manylora.doors.http.api.schema import MAX_TOKENS, Body, ChatRequest, Items, Text
from manylora.doors.http.serving.inference import Inference
from manylora.doors.http.serving.keys import ApiKey
from manylora.doors.http.serving.responses import Answers, TranslatedChat, encode, named_event

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
SEARCHES = ("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11")
"""Tools of OpenAI's servers that clients offer always, such as Codex. The model does not see them."""
PASSED = set(schema.GenerationRequest.model_fields) | set(schema.TemplateFields.model_fields)
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


class _Namespace(Body):
    """A group of functions. Its description is put before each of theirs."""

    type: Literal["namespace"]
    name: str = Field(min_length=1)
    description: str = ""
    tools: Items[dict[str, Any]] = Field(max_length=128)


class ResponsesRequest(schema.TemplateFields, schema.GenerationRequest):
    """Fields of chats that this API does not have work as they do in chats. store: remember the items of the
    answer for a while. Fields for tools and caches of OpenAI's servers have no effect.
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
    client_metadata: dict[str, Any] | None = None  # of Codex; no effect
    previous_response_id: Text | None = None
    conversation: Text | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    context_management: Items[dict[str, Any]] | None = None
    moderation: dict[str, Any] | None = None


class _Item(BaseModel):
    """An item, perhaps of another server. Fields that carry nothing for the model are dropped."""

    model_config = ConfigDict(extra="ignore", strict=True)


class _Part(_Item):
    """A part of a text. A refusal is a text that the model gave instead of an answer."""

    type: Literal["input_text", "output_text", "text", "refusal"]
    text: str | None = None
    refusal: str | None = None


class _Thought(_Item):
    text: str


class _ReasoningItem(_Item):
    """Summaries and encrypted reasoning are not shown to the model again."""

    content: Items[_Thought] = Field([])


class _MessageItem(_Item):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Items[dict[str, Any]]


class _CallItem(_Item):
    call_id: Text = Field(min_length=1)
    name: str
    namespace: str = ""
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
        chat |= {"tools": _tools(body.tools, "tools")}
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


def _tools(given: list[dict[str, Any]], where: str, space: _Namespace | None = None) -> list[dict[str, Any]]:
    """As chats have them."""
    found = []
    for number, one in enumerate(given):
        kind, place = str(one.get("type"))[:50], f"{where}.{number}"
        if kind == "function":
            tool = _checked(one, _Tool, place).model_dump(exclude={"type"}, exclude_none=True)
            if space is not None:
                tool["name"] = _full_name(space.name, tool["name"])
                tool["description"] = f"{space.description}\n{tool.get('description', '')}".strip()
            found.append({"type": "function", "function": tool})
        elif kind == "namespace" and space is None:
            inner = _checked(one, _Namespace, place)
            found += _tools(inner.tools, f"{place}.tools", inner)
        elif kind not in SEARCHES or space is not None:
            reason = f"{place}: {kind!r} is no tool of this server: leave it out, or give a function that "
            reason += "does it"
            raise unsupported_field(reason, place)
    return found


def _full_name(namespace: str, name: str) -> str:
    """Of a function, as the model sees it."""
    return f"{namespace}__{name}" if namespace else name


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
    """Messages as in a chat. Consecutive calls, and an assistant's text and reasoning before them, become one
    message.
    """
    found: list[dict[str, Any]] = []
    thought = ""  # of the next message of the assistant
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
            if thought and message.role == "assistant":
                found[-1]["reasoning_content"], thought = thought, ""
        elif kind == "function_call":
            call = _checked(given, _CallItem, where)
            if thought or not found or found[-1]["role"] != "assistant":
                found.append({"role": "assistant", "reasoning_content": thought or None})
                thought = ""
            function = {"name": _full_name(call.namespace, call.name), "arguments": call.arguments}
            found[-1].setdefault("tool_calls", []).append({"id": call.call_id, "function": function})
        elif kind == "function_call_output":
            output = _checked(given, _OutputItem, where)
            text = _text(output.output, f"{where}.output")
            found.append({"role": "tool", "tool_call_id": output.call_id, "content": text})
        elif kind == "item_reference":
            reason = f"{where}: this server no longer has that item: send the item itself"
            raise unsupported_field(reason, where)
        elif kind == "reasoning":
            thought = "\n".join(part.text for part in _checked(given, _ReasoningItem, where).content)
        else:
            reason = f"{where}: items of type {str(kind)[:50]!r} are not supported: leave it out"
            raise unsupported_field(reason, where)
    if not found:
        raise invalid_value("input: there is none", "input")
    return found


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


MAX_CHARACTERS = 2**24
Item = dict[str, Any]


class RecentItems:
    """Items by API key and id. The oldest are dropped first. Event loop only."""

    def __init__(self, max_items: int = MAX_ITEMS, max_characters: int = MAX_CHARACTERS) -> None:
        self._max_items, self._max_characters = max_items, max_characters
        self._items: OrderedDict[tuple[str, str], Item] = OrderedDict()
        self._num_characters = 0

    def add(self, owner: str, item: Item) -> None:
        self._items[owner, item["id"]] = item
        self._num_characters += _length(item)
        while len(self._items) > self._max_items or self._num_characters > self._max_characters:
            _, oldest = self._items.popitem(last=False)
            self._num_characters -= _length(oldest)

    def resolve(self, owner: str, given: Item) -> Item:
        """The item that a reference means. Anything else is returned as it is."""
        if given.get("type") not in (None, "item_reference") or "role" in given:
            return given
        return self._items.get((owner, str(given.get("id"))), given)


def _length(item: Item) -> int:
    if item["type"] == "function_call":
        return len(item["name"]) + len(item["arguments"])
    return sum(len(part["text"]) for part in item["content"])


COMPLETED, INCOMPLETE, FAILED, RUNNING = "completed", "incomplete", "failed", "in_progress"
CUT = {"length": INCOMPLETE}  # finish reason of a chat -> status; others: complete


async def respond(
    inference: Inference, recent: RecentItems, request: Request, body: ResponsesRequest, key: ApiKey
) -> Response:
    """recent: gets the answer's items unless `store` is false. Raises ApiError."""
    if not isinstance(body.input, str):
        body.input = [recent.resolve(key.name, item) for item in body.input]
    remember = partial(recent.add, key.name) if body.store else None
    try:
        build = partial(ResponsesAnswer, body, remember)
        return await inference.chat(request, chat_request(body), key, build, drops=body.truncation == "auto")
    except ApiError as error:
        raise in_words_of_responses(error) from error


class ResponsesAnswer(TranslatedChat):
    """remember: called with each complete item. An output is reasoning, a message and function calls."""

    def __init__(
        self, asked: ResponsesRequest, remember: Callable[[Item], None] | None, answers: Answers
    ) -> None:
        super().__init__(answers)
        self._remember = remember
        self.id = f"resp_{secrets.token_hex(24)}"
        self._asked = asked
        self._in_namespaces = {
            _full_name(space["name"], one["name"]): {"namespace": space["name"], "name": one["name"]}
            for space in asked.tools
            if space["type"] == "namespace"
            for one in space["tools"]
        }
        self._number = 0  # of the next event
        self._status = RUNNING
        self._output: list[dict[str, Any]] = []  # complete items
        self._kind = ""  # of the item being written: message, reasoning, function_call; empty: none is
        self._item: Item = {}
        self._text: list[str] = []  # its parts, as JSON
        self._log_probs: list[dict[str, Any]] = []
        self._versions: list[dict[str, Any]] = []  # adapter versions, as in a choice of a chat

    def body(self) -> dict[str, Any]:
        chat = super().body()
        choice = chat["choices"][0]
        self._choice_event(choice | {"delta": choice["message"]})
        return self._response(self._status, chat["usage"])

    def first_events(self) -> bytes:
        response = self._response(RUNNING)
        created = self._make("response.created", response=response)
        return (created + self._make("response.in_progress", response=response)).encode()

    def last_events(self, usage: bool) -> bytes:
        """Always includes usage."""
        response = self._response(self._status, self._usage_so_far())
        return self._make(f"response.{self._status}", response=response).encode()

    def error_events(self, error: ApiError) -> bytes:
        response = self._response(FAILED)
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        response["error"] = {"code": code, "message": in_words_of_responses(error).message}
        return self._make("response.failed", response=response).encode()

    def _text_delta(self, index: int, text: str) -> str:
        return self._open("message") + self._delta(text, "[]")

    def _choice_event(self, choice: dict[str, Any]) -> str:
        delta, log_probs = choice["delta"], _log_probs(choice)
        events = []
        if delta.get("reasoning"):
            events += [self._open("reasoning"), self._text_of("reasoning_text", delta["reasoning"])]
        if delta.get("content") or (log_probs and (self._kind == "message" or self._reply is None)):
            events.append(self._open("message"))
            self._log_probs += log_probs
            events.append(self._delta(encode(delta.get("content") or ""), encode(log_probs)))
        for call in delta.get("tool_calls") or ():
            function = call["function"]
            if "id" in call:
                events += [self._close(), self._open("function_call", call["id"], function["name"])]
            if function["arguments"]:
                events.append(self._text_of("function_call_arguments", function["arguments"]))
        if (reason := choice.get("finish_reason")) is not None:
            self._versions = choice.get("lora_versions", [])
            self._status = CUT.get(reason, COMPLETED)  # of the last item, too
            if not (self._output or self._kind):
                events.append(self._open("message"))  # without text, as there was none
            events.append(self._close())
        return "".join(events)

    def _open(self, kind: str, call_id: str = "", name: str = "") -> str:
        """Begin an item, unless one of its kind is being written. call_id, name: of a call."""
        if self._kind == kind:
            return ""
        closed = self._close()
        self._kind = kind
        spaced = self._in_namespaces.get(name, {})
        kinds: dict[str, tuple[str, dict[str, Any]]] = {
            "function_call": ("fc", {"call_id": call_id, "name": name, "arguments": ""} | spaced),
            "reasoning": ("rs", {"summary": [], "content": []}),
            "message": ("msg", {"role": "assistant", "content": []}),
        }
        prefix, fields = kinds[kind]
        self._item = {"type": kind, "id": f"{prefix}_{secrets.token_hex(24)}", "status": RUNNING, **fields}
        added = closed + self._make("response.output_item.added", output_index=self._at, item=self._item)
        if kind == "function_call":
            return added
        part = _thought("") if kind == "reasoning" else _part("", [])
        return added + self._make("response.content_part.added", **self._where, part=part)

    def _text_of(self, event: str, text: str) -> str:
        """A delta of reasoning, or of a call's arguments."""
        self._text.append(encode(text))
        return self._make(f"response.{event}.delta", **self._where, delta=text)

    def _delta(self, text: str, log_probs: str) -> str:
        """text, log_probs: as JSON. Nearly all events are of this kind."""
        self._text.append(text)
        self._number += 1
        return (
            'event: response.output_text.delta\ndata: {"type":"response.output_text.delta",'
            f'"sequence_number":{self._number - 1},"item_id":"{self._item["id"]}","output_index":{self._at},'
            f'"content_index":0,"delta":{text},"logprobs":{log_probs}}}\n\n'
        )

    def _close(self) -> str:
        """End the item that is being written."""
        if not self._kind:
            return ""
        text = json.loads('"' + "".join(piece[1:-1] for piece in self._text) + '"')
        status = COMPLETED if self._status == RUNNING else self._status  # the last one may be truncated
        item = self._item | {"status": status}
        if self._kind == "function_call":
            item["arguments"] = text
            told = {"name": item["name"], "arguments": text}
            events = [self._make("response.function_call_arguments.done", **self._where, **told)]
        else:
            part = _thought(text) if self._kind == "reasoning" else _part(text, self._log_probs)
            item["content"] = [part]
            shown = {name: one for name, one in part.items() if name in ("text", "logprobs")}
            events = [
                self._make(f"response.{part['type']}.done", **self._where, **shown),
                self._make("response.content_part.done", **self._where, part=part),
            ]
        events.append(self._make("response.output_item.done", output_index=self._at, item=item))
        self._output.append(item)
        if self._remember is not None:
            self._remember(item)
        self._kind, self._text, self._log_probs = "", [], []
        return "".join(events)

    @property
    def _at(self) -> int:
        """Index of the item that is being written."""
        return len(self._output)

    @property
    def _where(self) -> dict[str, Any]:
        where = {"item_id": self._item["id"], "output_index": self._at}
        return where if self._kind == "function_call" else {**where, "content_index": 0}

    def _make(self, kind: str, **fields: Any) -> str:
        """A server-sent event."""
        self._number += 1
        return named_event(kind, sequence_number=self._number - 1, **fields)

    def _response(self, status: str, usage: dict[str, Any] | None = None) -> dict[str, Any]:
        asked, given = self._asked, self._asked.model_fields_set
        params = self.generations[0].decoding.params
        wanted = asked.text and asked.text.format
        text = {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True, exclude_none=True)
        no_fields = {"description": None, "parameters": None, "strict": False}
        seen = (tool for tool in asked.tools if tool["type"] not in SEARCHES)
        tools = [{name: value for name, value in one.items() if value is not None} for one in seen]
        versions = {"lora_versions": self._versions} if self._versions else {}
        return versions | {
            "id": self.id,
            "object": "response",
            "created_at": self._common["created"],
            "completed_at": int(time.time()) if status == COMPLETED else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == INCOMPLETE else None,
            "model": self._common["model"],
            "output": self._output,
            "usage": usage and _usage_of(usage),
            "background": False,
            "conversation": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "max_tool_calls": asked.max_tool_calls,
            "metadata": asked.metadata,
            "parallel_tool_calls": asked.parallel_tool_calls,
            "previous_response_id": None,
            "prompt_cache_key": asked.prompt_cache_key,
            "reasoning": {"effort": (asked.reasoning or {}).get("effort"), "summary": None},
            "safety_identifier": asked.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": asked.temperature if "temperature" in given else params.temperature,
            "text": {"format": text},
            "tool_choice": asked.tool_choice,
            "tools": [no_fields | one if one["type"] == "function" else one for one in tools],
            "top_logprobs": asked.top_logprobs,
            "top_p": asked.top_p if "top_p" in given else params.top_p,
            "truncation": asked.truncation,
            "user": asked.user,
        }


def _thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def _part(text: str, log_probs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": log_probs}


def _log_probs(choice: dict[str, Any]) -> list[dict[str, Any]]:
    """Of a chat's choice. There a part of a character has no bytes; here it has an empty list."""

    def with_bytes(entry: dict[str, Any]) -> dict[str, Any]:
        return {**entry, "bytes": entry["bytes"] or []}

    found = (choice.get("logprobs") or {}).get("content") or []
    return [{**with_bytes(one), "top_logprobs": list(map(with_bytes, one["top_logprobs"]))} for one in found]


def _usage_of(chat: dict[str, Any]) -> dict[str, Any]:
    cached = (chat.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return {
        "input_tokens": chat["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": chat["completion_tokens"],
        "output_tokens_details": chat.get("completion_tokens_details", {"reasoning_tokens": 0}),
        "total_tokens": chat["total_tokens"],
    }
