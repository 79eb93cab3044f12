"""Tools of a chat: how the model sees them, guides for calls, and parsing calls from the output."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from manylora.doors.http.api.errors import ApiError, invalid_value
from manylora.doors.http.api.schema import AllowedToolChoice, ChatRequest, NamedToolChoice, Tool
from manylora.generation.generation import overlap
from manylora.generation.guides import closed, json_guide
from manylora.request import Guide

COMPACT = {"x-guidance": {"whitespace_flexible": False}}  # as the engine compiles a plain schema
TAG, END_TAG = "<tool_call>", "</tool_call>"
CALL_STARTS = ("{", "[", TAG, "<|python_tag|>")  # an output that is a call starts with one of these
# A truncated call: its name, and the start of its arguments.
UNFINISHED = re.compile(
    r'\{\s*"name"\s*:\s*"([^"\\]*)"\s*(?:,\s*"(?:arguments|parameters)"\s*:\s*(.*))?', re.DOTALL
)
PREFIXES = re.compile(r"\s*(<\|python_tag\|>|\[TOOL_CALLS\])?\s*")
BLOCK = re.compile(f"{TAG}(.*?)(?:{END_TAG}|$)", re.DOTALL)

Calls = list[dict[str, Any]]
"""`tool_calls` of a message."""


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
            return json_guide(_any_call(self.tools))
        if any(tool.function.strict for tool in self.tools):
            call = json.dumps(COMPACT | closed(_any_call(self.tools)))
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
    bound = body.response_format is not None and body.response_format.type != "text"
    if bound and not use.only_calls:
        reason = (
            "tools and response_format cannot be combined: leave one out, or set tool_choice to none, or to "
            "what must be called"
        )
        raise invalid_value(reason, "response_format")
    return use


class ToolCallParser:
    """Splits a growing output into content and tool calls. Withholds text that may become a call."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._pending = ""
        self._in_call = use.only_calls
        self._undecided = not self._in_call
        self.num_calls = 0

    def add(self, text: str, final: bool, cut: bool = False) -> tuple[str, Calls]:
        """New content, and the calls, which come with the final text only.

        cut: the token limit was reached. An incomplete last call is returned with the start of its arguments.
        """
        self._pending += text
        if final:
            content, calls = self._parse(cut)
            calls = calls if self._use.parallel else calls[:1]
            self.num_calls = len(calls)
            self._pending = ""
            return content, calls
        if self._undecided:
            start = self._pending.lstrip()
            if any(mark.startswith(start[: len(mark)]) for mark in CALL_STARTS):
                self._in_call = any(start.startswith(mark) for mark in CALL_STARTS)
                self._undecided = not self._in_call
            else:
                self._undecided = False
        if self._in_call or self._undecided:
            return "", []
        at = self._pending.find(TAG)  # content ends at the tag of a call, or at text that may become one
        self._in_call = at >= 0
        if at < 0:
            at = len(self._pending) - overlap(self._pending, TAG)
        shown, self._pending = self._pending[:at], self._pending[at:]
        return shown, []

    def _parse(self, cut: bool) -> tuple[str, Calls]:
        text = self._pending
        if self._use.named is not None:
            return "", [_call(self._use.named, text.strip())]
        if TAG in text:
            *whole, last = BLOCK.findall(text)
            found = [one for block in whole for one in self._read(block)]
            found += list(self._read(last)) or (self._unfinished(last) if cut else [])
            is_call = found or (cut and END_TAG not in text)
            return (text[: text.index(TAG)].rstrip(), found) if is_call else (text, [])
        inner = PREFIXES.sub("", text, count=1)
        found = list(self._read(inner))
        if not found and (cut or self._use.required):
            found = self._unfinished(inner)
        bare = "".join(inner.split()).removeprefix("[")  # a call whose name is still incomplete?
        begins = cut and any(f'{{"name":"{name}"'.startswith(bare) for name in self._use.names)
        return ("", found) if found or self._use.required or begins else (text, [])

    def _unfinished(self, text: str) -> Calls:
        """The calls of a text that ends within a call."""
        found: Calls = []
        text = text.strip().removeprefix("[").lstrip()
        while text:
            try:
                call, end = json.JSONDecoder().raw_decode(text)
            except (ValueError, RecursionError):
                match = UNFINISHED.fullmatch(text)
                if match is not None and match[1] in self._use.names:
                    found.append(_call(match[1], (match[2] or "").rstrip()))
                return found
            name, arguments = _name_and_arguments(call)
            if name not in self._use.names or arguments is None:
                return found
            found.append(_call(name, json.dumps(arguments, ensure_ascii=False)))
            text = text[end:].lstrip(" \n\t,]")
        return found

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
    """Llama says parameters, other models arguments."""
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
