"""Tools as plain text, for chat templates that do not know them: a system message, or the first user message
where the template has no system role, teaches the model how to call one. Earlier calls and their results are
written in the same form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]
RESULT = "Result of {name}: {content}"


def with_tools_as_text(
    messages: Messages, tools: Sequence[Mapping[str, Any]], has_system: bool = True
) -> list[Mapping[str, Any]]:
    """Messages of only the roles system, user and assistant, each with a content.

    tools: as chat templates take them. has_system: whether the template shows system messages. Results that
    follow each other become one message.
    """
    shown: list[Mapping[str, Any]] = []
    names: dict[Any, str] = {}  # of the functions, by the ids of their calls
    follows_result = False
    for message in messages:
        content, is_result = message.get("content") or "", message.get("role") == "tool"
        if is_result:
            name = names.get(message.get("tool_call_id")) or message.get("name") or "the function"
            content = RESULT.format(name=name, content=content)
            message = {"role": "user", "content": content}
            if follows_result:
                content = f"{shown.pop()['content']}\n{content}"
        elif calls := message.get("tool_calls"):
            names |= {call.get("id"): call["function"]["name"] for call in calls}
            content = "\n".join(filter(None, (content, _calls(calls))))
            message = {name: value for name, value in message.items() if name != "tool_calls"}
        shown.append({**message, "content": content})
        follows_result = is_result
    if tools:
        role, first = "system", 0
        if not has_system:
            role = "user"
            first = next((at for at, message in enumerate(shown) if message["role"] == role), 0)
        own = [shown.pop(first)["content"]] if first < len(shown) and shown[first]["role"] == role else []
        texts = [*own, _instructions(tools)] if has_system else [_instructions(tools), *own]
        shown.insert(first, {"role": role, "content": "\n\n".join(texts)})
    return shown


def has_tool_use(messages: Messages) -> bool:
    return any(message.get("tool_calls") or message.get("role") == "tool" for message in messages)


def call_arguments(given: Any) -> dict[str, Any]:
    """Arguments of a call: JSON text in OpenAI's messages, an object in chat templates. Raises ValueError."""
    try:
        found = json.loads(given or "{}") if isinstance(given, str) else given
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found


def _instructions(tools: Sequence[Mapping[str, Any]]) -> str:
    lines = [json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools]
    how = 'To call one, answer with nothing but JSON: {"name": its name, "arguments": {its arguments}}'
    then = f"The next message then has its result: {RESULT.format(name='its name', content='…')}"
    return "\n".join(["You can call these functions:", *lines, how, then])


def _calls(calls: Sequence[Mapping[str, Any]]) -> str:
    """In the form of `_instructions`; several as a list."""
    found = [{name: call["function"][name] for name in ("name", "arguments")} for call in calls]
    return json.dumps(found[0] if len(found) == 1 else found, ensure_ascii=False)
