"""/v1/responses: runs a chat and returns its answer in this API's format, complete or as events."""

from __future__ import annotations

import json
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from manylora.openai.api.errors import ApiError
from manylora.openai.api.responses_request import ResponsesRequest, chat_request, in_words_of_responses
from manylora.openai.serving.inference import Inference
from manylora.openai.serving.keys import ApiKey
from manylora.openai.serving.responses import Answers, ChatResponse, encode

MAX_ITEMS = 4096
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
        """The item that a reference means. Other items, and references to dropped items, are returned as they
        are.
        """
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
    remember = partial(recent.add, key.name) if body.store else _forget
    try:
        chat = chat_request(body)
        asked = await inference.ask(chat, key)
        if body.truncation == "auto":
            chat, prompt = await asked.prompts.chat_that_fits(chat)
        else:
            prompt = await asked.prompts.chat(chat)
        build = partial(ResponsesAnswer, body, remember)
        return await inference.chat_from(request, chat, asked, prompt, build)
    except ApiError as error:
        raise in_words_of_responses(error) from error


def _forget(item: dict[str, Any]) -> None:
    pass


class ResponsesAnswer(ChatResponse):
    """asked: the body. remember: called with each complete item. An output is a message, or function calls,
    or both.
    """

    def __init__(
        self, asked: ResponsesRequest, remember: Callable[[dict[str, Any]], None], answers: Answers
    ) -> None:
        super().__init__(answers)
        self._remember = remember
        self.id = f"resp_{secrets.token_hex(24)}"
        self._asked = asked
        self._number = 0  # of the next event
        self._status = RUNNING
        self._output: list[dict[str, Any]] = []  # complete items
        self._message_id = ""  # of the message being written; empty: none
        self._text: list[str] = []  # its parts, as JSON
        self._log_probs: list[dict[str, Any]] = []
        self._versions: list[dict[str, Any]] = []  # adapter versions, as in a choice of a chat
        self._calls: dict[int, dict[str, Any]] = {}  # calls being written, by their index in the chat

    def body(self) -> dict[str, Any]:
        chat = super().body()
        choice = chat["choices"][0]
        self._versions = choice.get("lora_versions", [])
        message, status = choice["message"], CUT.get(choice["finish_reason"], COMPLETED)
        calls = message.get("tool_calls") or []
        if message["content"] or not calls:
            log_probs = _log_probs(choice)
            self._add(_message(_new_id("msg"), status, message["content"] or "", log_probs))
        for call in calls:
            function = call["function"]
            self._add(_call(call["id"], function["name"], function["arguments"], status))
        return self._response(status, chat["usage"])

    def first_events(self) -> bytes:
        response = self._response(RUNNING)
        created = self._make("response.created", response=response)
        return (created + self._make("response.in_progress", response=response)).encode()

    def last_events(self, usage: bool) -> bytes:
        """Always includes usage."""
        response = self._response(self._status, self._usage(sum(self._tokens_sent.values())))
        return self._make(f"response.{self._status}", response=response).encode()

    def error_events(self, error: ApiError) -> bytes:
        response = self._response(FAILED)
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        response["error"] = {"code": code, "message": in_words_of_responses(error).message}
        return self._make("response.failed", response=response).encode()

    def _text_delta(self, index: int, text: str) -> str:
        return self._open_message() + self._delta(text, "[]")

    def _event(self, choice: str, more: str = "") -> str:
        return choice  # `_text_delta` has already made it events

    def _choice_event(self, choice: dict[str, Any]) -> str:
        delta, log_probs = choice["delta"], _log_probs(choice)
        events = []
        if delta.get("content") or log_probs:
            events.append(self._open_message())
            self._log_probs += log_probs
            events.append(self._delta(encode(delta.get("content") or ""), encode(log_probs)))
        for call in delta.get("tool_calls") or ():
            events.append(self._write_call(call))
        reason = choice.get("finish_reason")
        if reason is not None:
            self._versions = choice.get("lora_versions", [])
            self._status = CUT.get(reason, COMPLETED)
            if not self._calls and not self._output:
                events.append(self._open_message())  # without text, if there was none
            events.append(self._close_message())
            events += [self._close_call(number) for number in list(self._calls)]
        return "".join(events)

    def _open_message(self) -> str:
        if self._message_id:
            return ""
        self._message_id = _new_id("msg")
        item = {**_message(self._message_id, RUNNING, "", []), "content": []}
        part = _part("", [])
        return self._make("response.output_item.added", output_index=self._at, item=item) + self._make(
            "response.content_part.added", **self._where, part=part
        )

    def _delta(self, text: str, log_probs: str) -> str:
        """text, log_probs: as JSON. Nearly all events are of this kind."""
        self._text.append(text)
        self._number += 1
        return (
            'event: response.output_text.delta\ndata: {"type":"response.output_text.delta",'
            f'"sequence_number":{self._number - 1},"item_id":"{self._message_id}","output_index":{self._at},'
            f'"content_index":0,"delta":{text},"logprobs":{log_probs}}}\n\n'
        )

    def _close_message(self) -> str:
        if not self._message_id:
            return ""
        text = json.loads('"' + "".join(piece[1:-1] for piece in self._text) + '"')
        item = _message(self._message_id, self._item_status, text, self._log_probs)
        shown = {"text": text, "logprobs": self._log_probs}
        events = [
            self._make("response.output_text.done", **self._where, **shown),
            self._make("response.content_part.done", **self._where, part=_part(text, self._log_probs)),
            self._make("response.output_item.done", output_index=self._at, item=item),
        ]
        self._add(item)
        self._message_id = ""
        return "".join(events)

    def _write_call(self, given: dict[str, Any]) -> str:
        """given: from a chat's delta. A call's name comes first, then its arguments, at once or in parts."""
        number, function, events = given["index"], given.get("function", {}), []
        if number not in self._calls:
            events.append(self._close_message())
            events += [self._close_call(other) for other in list(self._calls)]
            item = _call(given["id"], function["name"], "", RUNNING)
            self._calls[number] = item
            events.append(self._make("response.output_item.added", output_index=self._at, item=item))
        piece = function.get("arguments") or ""
        item = self._calls[number]
        item["arguments"] += piece
        if piece:
            where = {"item_id": item["id"], "output_index": self._at}
            events.append(self._make("response.function_call_arguments.delta", **where, delta=piece))
        return "".join(events)

    def _close_call(self, number: int) -> str:
        item = self._calls.pop(number)
        item["status"] = self._item_status
        where = {"item_id": item["id"], "output_index": self._at}
        told = {"name": item["name"], "arguments": item["arguments"]}
        done = self._make("response.function_call_arguments.done", **where, **told)
        done += self._make("response.output_item.done", output_index=self._at, item=item)
        self._add(item)
        return done

    def _add(self, item: dict[str, Any]) -> None:
        """Append a complete item."""
        self._output.append(item)
        self._remember(item)

    @property
    def _item_status(self) -> str:
        """Status of a complete item. The last one may be truncated."""
        return COMPLETED if self._status == RUNNING else self._status

    @property
    def _at(self) -> int:
        """Index of the item that is being written."""
        return len(self._output)

    @property
    def _where(self) -> dict[str, Any]:
        return {"item_id": self._message_id, "output_index": self._at, "content_index": 0}

    def _make(self, kind: str, **fields: Any) -> str:
        """A server-sent event."""
        body = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return f"event: {kind}\ndata: {encode(body)}\n\n"

    def _response(self, status: str, usage: dict[str, Any] | None = None) -> dict[str, Any]:
        asked = self._asked
        params, given = self.generations[0].decoding.params, asked.model_fields_set
        now = int(time.time())
        versions = {"lora_versions": self._versions} if self._versions else {}
        return versions | {
            "id": self.id,
            "object": "response",
            "created_at": self._common["created"],
            "completed_at": now if status == COMPLETED else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == INCOMPLETE else None,
            "model": self._common["model"],
            "output": self._output,
            "usage": usage and _usage(usage),
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
            "text": _text_config(asked),
            "tool_choice": asked.tool_choice,
            "tools": [_tool(one) for one in asked.tools],
            "top_logprobs": asked.top_logprobs,
            "top_p": asked.top_p if "top_p" in given else params.top_p,
            "truncation": asked.truncation,
            "user": asked.user,
        }


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(24)}"


def _message(item_id: str, status: str, text: str, log_probs: list[dict[str, Any]]) -> dict[str, Any]:
    content = [_part(text, log_probs)]
    return {"type": "message", "id": item_id, "status": status, "role": "assistant", "content": content}


def _part(text: str, log_probs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": log_probs}


def _call(call_id: str, name: str, arguments: str, status: str) -> dict[str, Any]:
    item = {"type": "function_call", "id": _new_id("fc"), "call_id": call_id, "name": name}
    return {**item, "arguments": arguments, "status": status}


def _log_probs(choice: dict[str, Any]) -> list[dict[str, Any]]:
    """Of a chat's choice. There a part of a character has no bytes; here it has an empty list."""
    found = (choice.get("logprobs") or {}).get("content") or []
    return [
        {**_bytes(one), "top_logprobs": [_bytes(other) for other in one["top_logprobs"]]} for one in found
    ]


def _bytes(entry: dict[str, Any]) -> dict[str, Any]:
    return {**entry, "bytes": entry["bytes"] or []}


def _usage(chat: dict[str, Any]) -> dict[str, Any]:
    cached = (chat.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return {
        "input_tokens": chat["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": chat["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": chat["total_tokens"],
    }


def _text_config(asked: ResponsesRequest) -> dict[str, Any]:
    wanted = asked.text and asked.text.format
    if wanted is None:
        return {"format": {"type": "text"}}
    return {"format": wanted.model_dump(by_alias=True, exclude_none=True)}


def _tool(given: dict[str, Any]) -> dict[str, Any]:
    """A tool as the API shows it: with all fields."""
    whole = {"description": None, "parameters": None, "strict": False}
    return {**whole, **{name: value for name, value in given.items() if value is not None}}
