"""Tools of a chat: how the model sees them, guides for calls, and how the output is read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from manylora.doors.http.api.errors import ApiError, invalid_value
from manylora.doors.http.api.schema import AllowedToolChoice, ChatRequest, NamedToolChoice, Tool
from manylora.generation.guides import closed, json_guide
from manylora.generation.reply import ReplyFormat
from manylora.generation.reply_formats import SECTIONS, TOOL_MARKS, Parsers, marks_of, thinking_of
from manylora.request import Guide

COMPACT = {"x-guidance": {"whitespace_flexible": False}}  # as the engine compiles a plain schema
NOT_JSON = {*SECTIONS, "<function=", "<|tool_call>"}  # calls that begin so


@dataclass(frozen=True)
class ToolUse:
    """required: the model must call a tool. named: it must call this one. parallel: it may call several."""

    tools: Sequence[Tool]
    required: bool = False
    named: str | None = None
    parallel: bool = True

    @property
    def names(self) -> set[str]:
        return {tool.function.name for tool in self.tools}

    @property
    def only_calls(self) -> bool:
        """Whether the output consists of calls only, without text."""
        return self.required or self.named is not None

    @property
    def specs(self) -> list[dict[str, Any]]:
        """The tools as chat templates take them."""
        return [tool.model_dump(exclude_none=True) for tool in self.tools]

    def guide(self) -> Guide | None:
        """The guide of the output. None: free text, which is searched for calls. Raises ApiError."""
        if self.named is not None:
            wanted = next(tool for tool in self.tools if tool.function.name == self.named)
            return json_guide(_arguments(wanted))
        if self.required:
            return json_guide(any_call(self.tools))
        if any(tool.function.strict for tool in self.tools):
            call = json.dumps(COMPACT | closed(any_call(self.tools)))
            text = r"/\s*([^\s{\[<](.|\n)*)?/"
            return Guide("lark_grammar", f"start: text | call\ntext: {text}\ncall: %json {call}\n")
        return None


def tool_use(body: ChatRequest) -> ToolUse | None:
    """None: the output cannot have tool calls. Raises ApiError."""
    choice, tools = body.tool_choice, body.tools
    if isinstance(choice, AllowedToolChoice):
        allowed = {one.function.name for one in choice.allowed_tools.tools}
        unknown = sorted(allowed - {tool.function.name for tool in tools})
        if unknown:
            raise invalid_value(f"tool_choice: there is no tool {unknown[0]!r}", "tool_choice")
        tools = [tool for tool in tools if tool.function.name in allowed]
        choice = choice.allowed_tools.mode
    named = choice.function.name if isinstance(choice, NamedToolChoice) else None
    if not tools:
        if named is not None or choice == "required":
            raise ApiError(400, "missing_field", "tool_choice needs tools", "tools")
        return None
    use = ToolUse(tools, choice == "required", named, body.parallel_tool_calls)
    if len(use.names) < len(tools):
        raise invalid_value("tools: two have the same name", "tools")
    if named is not None and named not in use.names:
        raise invalid_value(f"tool_choice: there is no tool {named!r}", "tool_choice")
    if choice == "none":
        return None
    return use


def json_marks(parsers: Parsers, template: str | None) -> dict[str, str]:
    """What the template shows before a call that is JSON, and behind it."""
    marks = marks_of(parsers.tools, template)
    return {one: TOOL_MARKS[one] for one in marks if one in (template or "") and one not in NOT_JSON}


def reply_format(
    body: ChatRequest, use: ToolUse | None, parsers: Parsers, template: str | None, prompt: str
) -> ReplyFormat | None:
    """How the outputs are read. None: they are content. prompt: the rendered template."""
    thinking = thinking_of(parsers.reasoning, template)
    if thinking is None and use is None:
        return None
    opened = False
    if thinking is not None:
        end = prompt.rstrip()
        opened = end.endswith(thinking.starts) or (thinking.always and not end.endswith(thinking.ends))
        if body.continue_final_message:
            text = body.messages[-1].text
            begun, ended = (max(map(text.rfind, one)) for one in (thinking.starts, thinking.ends))
            opened = begun > ended
    return ReplyFormat(
        thinking,
        opened and not (thinking and thinking.inner),
        {tool.function.name: tool.function.parameters or {} for tool in use.tools} if use else {},
        marks_of(parsers.tools, template) if use else (),
        use.named if use else None,
        use is not None and use.only_calls,
        use is None or use.parallel,
        hidden=not body.include_reasoning,
    )


def _arguments(tool: Tool) -> dict[str, Any]:
    return {"type": "object", **(tool.function.parameters or {})}


def any_call(tools: Sequence[Tool]) -> dict[str, Any]:
    """JSON schema of a call of any of these tools. `$defs` move to the top level."""
    definitions: dict[str, dict[str, Any]] = {}
    calls = []
    for tool in tools:
        arguments = _arguments(tool)
        for key in ("$defs", "definitions"):
            given = arguments.pop(key, {})
            known = definitions.setdefault(key, {})
            if not isinstance(given, dict) or any(known.get(n, one) != one for n, one in given.items()):
                reason = f"tools: {key} of two tools differ under one name"
                raise invalid_value(reason, "tools")
            known.update(given)
        fields = {"name": {"const": tool.function.name}, "arguments": arguments}
        shape = {"type": "object", "properties": fields, "required": ["name", "arguments"]}
        calls.append({**shape, "additionalProperties": False})
    return {"anyOf": calls, **{key: value for key, value in definitions.items() if value}}
