"""Messages of a chat in the form that chat templates expect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from manylora.openai.api.errors import invalid_value
from manylora.openai.api.parsing import check_size
from manylora.openai.api.schema import Message, ToolCall
from manylora.text.chat_template import ROLES
from manylora.text.tool_text import call_arguments


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Raises ApiError."""
    return [_template_message(message) for message in messages]


def num_characters(messages: Sequence[Message]) -> int:
    """Characters of all texts and of the arguments of tool calls."""
    calls = [call for message in messages for call in message.tool_calls]
    return sum(len(message.text) for message in messages) + sum(len(c.function.arguments) for c in calls)


def _template_message(message: Message) -> dict[str, Any]:
    shown: dict[str, Any] = {"role": ROLES.get(message.role, message.role), "content": message.text}
    for name in ("name", "tool_call_id"):
        if getattr(message, name) is not None:
            shown[name] = getattr(message, name)
    if message.tool_calls:
        shown["tool_calls"] = [_call(call) for call in message.tool_calls]
    return shown


def _call(call: ToolCall) -> dict[str, Any]:
    """Raises ApiError."""
    try:
        check_size(call.function.arguments.encode())
        arguments = call_arguments(call.function.arguments)
    except ValueError as error:
        reason = "messages: arguments of a tool call must be a JSON object"
        raise invalid_value(reason, "messages") from error
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}
