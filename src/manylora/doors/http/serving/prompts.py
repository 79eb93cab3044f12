"""Prompts: converts texts and messages to token ids and back, each on the right thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any, TypeVar

from manylora.doors.http.api.errors import ApiError, context_length, invalid_value
from manylora.doors.http.api.params import Limits
from manylora.doors.http.api.parsing import check_size
from manylora.doors.http.api.schema import (
    ChatRequest,
    DetokenizeRequest,
    Message,
    TemplateFields,
    TokenizeRequest,
)
from manylora.doors.http.api.tools import ToolUse, tool_use
from manylora.errors import RequestError, TextTooLongError
from manylora.generation.chat_template import ROLES, call_arguments
from manylora.generation.tokenizer import Tokenizer
from manylora.system.threads import LONG, TextThreads

Result = TypeVar("Result")
OWN = {"add_generation_prompt", "reasoning_effort"}  # our variables, in addition to a client's
TOO_LONG = "context_length_exceeded"
LEADING = ("system", "developer")  # roles of messages that stay when others are dropped
# Tokenizer settings that refer to files on the machine where it was made.
ABOUT_FILES = ("name_or_path", "_name_or_path", "auto_map", "tokenizer_file", "special_tokens_map_file")


@dataclass(frozen=True)
class ChatPrompt:
    """text: the rendered chat template. ids: its tokens."""

    text: str
    ids: tuple[int, ...]


class Prompts:
    """Its methods raise ApiError."""

    def __init__(self, tokenizer: Tokenizer, limits: Limits) -> None:
        self.tokenizer, self._limits = tokenizer, limits
        self._lanes = TextThreads()

    def with_tokenizer(self, tokenizer: Tokenizer) -> Prompts:
        """A copy on the same threads with another tokenizer or chat template."""
        other = copy(self)
        other.tokenizer = tokenizer
        return other

    async def tokenize(self, body: TokenizeRequest) -> list[int]:
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "missing_field", "prompt or messages is required, one of them", "prompt")
        if body.messages is not None:
            text = await self.render(body.messages, body)
            return list(await self.encode(text, False, "messages", whole=False))
        if body.tools:
            raise invalid_value("tools needs messages", "tools")
        text = body.prompt or ""
        return list(await self.encode(text, body.add_special_tokens, "prompt", whole=False))

    async def chat(self, body: ChatRequest) -> ChatPrompt:
        text = await self.render(body.messages, body)
        return ChatPrompt(
            text, await self.encode(text, False, "messages", body.truncate_prompt_tokens is None)
        )

    async def chat_that_fits(self, body: ChatRequest) -> tuple[ChatRequest, ChatPrompt]:
        """The body and its prompt, without as many of the oldest messages as necessary. Raises ApiError.

        The system messages at the start, the last message, and room for what the body asks for, or a token,
        stay.
        """
        messages = body.messages
        first = next((i for i, one in enumerate(messages) if one.role not in LEADING), 0)
        last = len(messages) - 1
        try:
            return body, await self._chat_with_room(body)
        except ApiError as error:
            if error.code != TOO_LONG or last <= first:
                raise
        best, fewest, most = None, first + 1, last  # the first message after the gap
        while best is None or fewest < most:
            middle = most if best is None else (fewest + most) // 2
            # Without tool results at the start, whose calls were dropped.
            start = next((i for i in range(middle, last) if messages[i].role != "tool"), last)
            shorter = body.model_copy(update={"messages": [*messages[:first], *messages[start:]]})
            try:
                best, most = (shorter, await self._chat_with_room(shorter)), middle
            except ApiError as error:
                if error.code != TOO_LONG or best is None:
                    raise
                fewest = middle + 1
        return best

    async def _chat_with_room(self, body: ChatRequest) -> ChatPrompt:
        """Raises ApiError if the tokens that the body asks for do not fit after the prompt."""
        prompt = await self.chat(body)
        wanted = body.max_completion_tokens or body.max_tokens or 1
        most = self._limits.max_seq_len
        if len(prompt.ids) + wanted > most:
            reason = f"The prompt has {len(prompt.ids)} and {wanted} more are asked for"
            raise ApiError(400, TOO_LONG, f"{context_length(most)}. {reason}", "messages")
        return prompt

    async def detokenize(self, body: DetokenizeRequest) -> str:
        if max(body.tokens, default=0) >= self._limits.vocab_size:
            raise invalid_value("tokens: one of them is not a token id of this model", "tokens")
        return await self._run_in_lane(len(body.tokens), self.tokenizer.decode, body.tokens, False)

    def tokenizer_info(self) -> dict[str, Any]:
        """As in vLLM: tokenizer_config.json, with the chat template that is used."""
        found: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        for name, value in self.tokenizer.settings.items():
            is_token = name.endswith("_token") and isinstance(value, dict)
            if name not in ABOUT_FILES:
                found[name] = value.get("content") if is_token else value
        return found | {"chat_template": self.tokenizer.chat_template}

    async def render(self, messages: Sequence[Message], body: TemplateFields) -> str:
        """Apply the chat template."""
        if body.continue_final_message and body.add_generation_prompt:
            reason = "continue_final_message and add_generation_prompt exclude each other: give one"
            raise invalid_value(reason, "continue_final_message")
        use = None
        if isinstance(body, ChatRequest) and body.include_json_schema_in_prompt:
            use = tool_use(body)
        elif isinstance(body, TokenizeRequest) and body.tools:
            use = ToolUse(body.tools)
        calls = [call for message in messages for call in message.tool_calls]
        length = sum(len(one.text) + len(one.thought) for one in messages)
        length += sum(len(one.function.arguments) for one in calls)
        given: dict[str, Any] = {"add_generation_prompt": body.add_generation_prompt}
        if isinstance(body, ChatRequest):
            given["reasoning_effort"] = body.reasoning_effort
            if body.response_format is not None and body.include_json_schema_in_prompt:
                given["json_schema"] = body.response_format.schema_given
        variables = {name: one for name, one in given.items() if one is not None} | body.chat_template_kwargs

        def apply_template() -> str:
            shown, specs = [_template_message(message) for message in messages], use.specs if use else []
            context, continues = self._limits.max_seq_len, body.continue_final_message
            try:
                return self.tokenizer.chat(shown, specs, context, variables, continues)
            except TextTooLongError:
                raise
            except RequestError as error:
                raise invalid_value(str(error), "messages") from error

        with self._bounded("messages"):
            self.tokenizer.check_length(length, self._limits.max_seq_len, whole=False)
            slow = use is not None or not variables.keys() <= OWN
            return await self._run_in_lane(max(length, LONG if slow else 0), apply_template)

    async def encode(self, text: str, special: bool, field: str, whole: bool = True) -> tuple[int, ...]:
        """whole: the whole text must fit the model's context."""
        context, encode = self._limits.max_seq_len, self.tokenizer.encode
        with self._bounded(field):
            self.tokenizer.check_length(len(text), context, whole)
            room = context if whole else None
            return tuple(await self._run_in_lane(len(text), encode, text, special, room))

    async def encode_pair(self, first: str, second: str, field: str) -> tuple[list[int], int]:
        """As `Tokenizer.encode_pair`."""
        length, context = len(first) + len(second), self._limits.max_seq_len
        with self._bounded(field):
            return await self._run_in_lane(length, self.tokenizer.encode_pair, first, second, context)

    async def _run_in_lane(self, length: int, function: Callable[..., Result], *arguments: Any) -> Result:
        """Run a function on a text of this length, on a thread if it is long."""
        lane = self._lanes.executor(length)
        if lane is None:
            return function(*arguments)
        return await asyncio.get_running_loop().run_in_executor(lane, function, *arguments)

    @contextmanager
    def _bounded(self, field: str) -> Iterator[None]:
        """Name the field of a text that is too long."""
        try:
            yield
        except TextTooLongError as error:
            reason = f"{context_length(self._limits.max_seq_len)}. {error}"
            raise ApiError(400, TOO_LONG, reason, field) from error


def _template_message(message: Message) -> dict[str, Any]:
    """Raises ApiError."""
    shown: dict[str, Any] = {"role": ROLES.get(message.role, message.role), "content": message.text}
    for name in ("name", "tool_call_id"):
        if getattr(message, name) is not None:
            shown[name] = getattr(message, name)
    if message.thought:
        shown["reasoning_content"] = message.thought
        if not (message.tool_calls and message.text):  # gpt-oss's name; its template refuses both with calls
            shown["thinking"] = message.thought
    if message.tool_calls:
        shown["tool_calls"] = []
    for call in message.tool_calls:
        try:
            check_size(call.function.arguments.encode())
            arguments = call_arguments(call.function.arguments)
        except ValueError as error:
            reason = "messages: arguments of a tool call must be a JSON object"
            raise invalid_value(reason, "messages") from error
        function = {"name": call.function.name, "arguments": arguments}
        shown["tool_calls"].append({"id": call.id, "type": "function", "function": function})
    return shown
