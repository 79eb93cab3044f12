"""Tools of a chat: what the model is told of them, what binds its answer, and the calls found in its text."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from manylora.openai.api.errors import ApiError
from manylora.openai.api.schema import ChatRequest, NamedToolChoice, Tool
from manylora.request import Guide

__all__ = ["WHITESPACE", "Calls", "ToolText", "ToolUse", "json_guide", "tool_use"]

# JSON may have any amount of white space between its parts, and a small model then writes nothing else.
WHITESPACE = {"x-guidance": {"whitespace_pattern": r"[ \n\t]{0,20}"}}
TAG, END_TAG = "<tool_call>", "</tool_call>"
MARKS = ("{", "[", TAG, "<|python_tag|>")  # how answers begin that are calls
PREFIXES = re.compile(r"\s*(<\|python_tag\|>|\[TOOL_CALLS\])?\s*")
BLOCK = re.compile(f"{TAG}(.*?)(?:{END_TAG}|$)", re.DOTALL)

Calls = list[dict[str, Any]]
"""`tool_calls` of a message."""


def json_guide(schema: dict[str, Any]) -> Guide:
    return Guide("json_schema", json.dumps(WHITESPACE | schema))


@dataclass(frozen=True)
class ToolUse:
    """tools: the model may call. named: it must call this one. required: it must call one of them."""

    tools: Sequence[Tool]
    required: bool = False
    named: str | None = None
    parallel: bool = True  # several calls in one answer

    @property
    def names(self) -> set[str]:
        return {tool.function.name for tool in self.tools}

    @property
    def specs(self) -> list[dict[str, Any]]:
        """As chat templates show them."""
        return [tool.model_dump(exclude_none=True) for tool in self.tools]

    def guide(self) -> Guide | None:
        """What the answer must match. None: free text, in which calls are looked for. Raises ApiError."""
        if self.named is not None:
            wanted = next(tool for tool in self.tools if tool.function.name == self.named)
            return json_guide(_arguments(wanted))
        if self.required:
            return json_guide(_any_call(self.tools))
        if any(tool.function.strict for tool in self.tools):
            call = json.dumps(WHITESPACE | _any_call(self.tools))
            return Guide(
                "lark_grammar",
                f"start: text | call\ntext: /\\s*([^\\s{{\\[<](.|\\n)*)?/\ncall: %json {call}\n",
            )
        return None

    def instructions(self) -> str:
        """A system message for models whose chat template does not know tools."""
        lines = [json.dumps(spec["function"], ensure_ascii=False) for spec in self.specs]
        how = 'To call one, answer with nothing but JSON: {"name": its name, "arguments": {its arguments}}'
        return "\n".join(["You can call these functions:", *lines, how])


def tool_use(body: ChatRequest) -> ToolUse | None:
    """None: the answer is text. Raises ApiError."""
    choice = body.tool_choice
    named = choice.function.name if isinstance(choice, NamedToolChoice) else None
    if not body.tools:
        if named is not None or choice == "required":
            raise ApiError(400, "missing_field", "tool_choice needs tools", "tools")
        return None
    use = ToolUse(body.tools, choice == "required", named, body.parallel_tool_calls)
    if len(use.names) < len(body.tools):
        raise ApiError(400, "invalid_value", "tools: two have the same name", "tools")
    if named is not None and named not in use.names:
        raise ApiError(400, "invalid_value", f"tool_choice: there is no tool {named!r}", "tool_choice")
    if choice == "none":
        return None
    if body.response_format is not None and body.response_format.type != "text":
        raise ApiError(
            400,
            "invalid_value",
            "tools and response_format cannot be combined: leave one out, or set tool_choice to none",
            "response_format",
        )
    return use


class ToolText:
    """One answer as it grows: text that may become a call is held back until that is known."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._held = ""
        self._calling = use.required or use.named is not None
        self._deciding = not self._calling
        self.num_calls = 0

    def add(self, text: str, final: bool) -> tuple[str, Calls]:
        """New content to show, and the calls, which come with the end."""
        self._held += text
        if final:
            content, calls = self._parse()
            calls = calls if self._use.parallel else calls[:1]
            self.num_calls = len(calls)
            self._held = ""
            return content, calls
        if self._deciding:
            begun = self._held.lstrip()
            if any(mark.startswith(begun[: len(mark)]) for mark in MARKS):
                self._calling = any(begun.startswith(mark) for mark in MARKS)
                self._deciding = not self._calling
            else:
                self._deciding = False
        if self._calling or self._deciding:
            return "", []
        return self._show(), []

    def _show(self) -> str:
        """Everything up to what is, or may become, the mark of a call."""
        at = self._held.find(TAG)
        self._calling = at >= 0
        if at < 0:
            at = len(self._held) - next(
                (n for n in range(len(TAG) - 1, 0, -1) if self._held.endswith(TAG[:n])), 0
            )
        shown, self._held = self._held[:at], self._held[at:]
        return shown

    def _parse(self) -> tuple[str, Calls]:
        text = self._held
        if self._use.named is not None:
            return "", [_call(self._use.named, text.strip())]
        if TAG in text:
            found = [one for block in BLOCK.findall(text) for one in self._read(block)]
            return (text[: text.index(TAG)].rstrip(), found) if found else (text, [])
        found = list(self._read(PREFIXES.sub("", text, count=1)))
        return ("", found) if found else (text, [])

    def _read(self, text: str) -> Iterator[dict[str, Any]]:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return
        calls = value if isinstance(value, list) else [value]
        pairs = [_name_and_arguments(call) for call in calls]
        if all(name in self._use.names and arguments is not None for name, arguments in pairs):
            for name, arguments in pairs:
                yield _call(name, json.dumps(arguments, ensure_ascii=False))


def _name_and_arguments(call: Any) -> tuple[str, dict[str, Any] | None]:
    """Llama writes parameters, all others arguments."""
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return "", None
    found = call.get("arguments", call.get("parameters"))
    return call["name"], found if isinstance(found, dict) else None


def _call(name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def _arguments(tool: Tool) -> dict[str, Any]:
    return {"type": "object", **(tool.function.parameters or {})}


def _any_call(tools: Sequence[Tool]) -> dict[str, Any]:
    """The schema of a call of any of these. Definitions move to the top, where references look for them."""
    definitions: dict[str, dict[str, Any]] = {}
    calls = []
    for tool in tools:
        arguments = _arguments(tool)
        for key in ("$defs", "definitions"):
            given = arguments.pop(key, {})
            known = definitions.setdefault(key, {})
            if not isinstance(given, dict) or any(known.get(n, one) != one for n, one in given.items()):
                reason = f"tools: {key} of two tools differ under one name"
                raise ApiError(400, "invalid_value", reason, "tools")
            known.update(given)
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool.function.name}, "arguments": arguments},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    return {"anyOf": calls, **{key: value for key, value in definitions.items() if value}}
