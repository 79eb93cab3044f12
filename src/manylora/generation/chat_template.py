"""ChatTemplate: renders messages to a prompt with the Jinja template of a tokenizer directory."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jinja2 import Template
from jinja2.exceptions import TemplateError
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from manylora.errors import ConfigError, RequestError, TextTooLongError

Messages = Sequence[Mapping[str, Any]]
RESULT = "Result of {name}: {content}"
HOW = 'To call one, answer with nothing but JSON: {"name": its name, "arguments": {its arguments}}'
THEN = f"The next message then has its result: {RESULT.format(name='its name', content='…')}"


def with_tools_as_text(
    messages: Messages, tools: Sequence[Mapping[str, Any]], has_system: bool = True
) -> list[Mapping[str, Any]]:
    """Messages of only the roles system, user and assistant. Results that follow each other become one.

    tools: as chat templates take them. has_system: whether the template shows system messages.
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
            # In the form of HOW; several as a list.
            found = [{one: call["function"][one] for one in ("name", "arguments")} for call in calls]
            text = json.dumps(found[0] if len(found) == 1 else found, ensure_ascii=False)
            content = "\n".join(filter(None, (content, text)))
            message = {name: value for name, value in message.items() if name != "tool_calls"}
        shown.append({**message, "content": content})
        follows_result = is_result
    if tools:
        role, first = "system", 0
        if not has_system:
            role = "user"
            first = next((at for at, message in enumerate(shown) if message["role"] == role), 0)
        own = [shown.pop(first)["content"]] if first < len(shown) and shown[first]["role"] == role else []
        functions = [json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools]
        text = "\n".join(["You can call these functions:", *functions, HOW, THEN])
        texts = [*own, text] if has_system else [text, *own]
        shown.insert(first, {"role": role, "content": "\n\n".join(texts)})
    return shown


def call_arguments(given: Any) -> dict[str, Any]:
    """Arguments of a call: JSON text in OpenAI's messages, an object in chat templates. Raises ValueError."""
    try:
        found = json.loads(given or "{}") if isinstance(given, str) else given
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found


FILE = "chat_template.jinja"
ROLES = {"developer": "system"}  # templates only know the older name
# Characters of a prompt, and of one JSON text in it: nested lists with indentation grow quadratically.
MOST = 2**22
NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})


class ChatTemplate:
    """sources: templates by name; `default` is the usual one. settings: from tokenizer_config.json.

    Templates get what transformers passes to them: messages, tools, special tokens, `raise_exception`,
    `strftime_now`, and a `tojson` that does not escape HTML. Raises ConfigError for an invalid template.
    """

    def __init__(self, sources: Mapping[str, str], settings: Mapping[str, Any]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _now
        self._tokens = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in settings.items()
            if name.endswith("_token") and isinstance(value, str | dict)
        }
        self._templates: dict[str, Any] = {}
        self.takes_tools = False
        self._shows_calls = any("tool_calls" in text for text in sources.values())
        self.source = sources.get("default")
        for name, text in sources.items():
            try:
                self._templates[name] = environment.from_string(text)
                names = find_undeclared_variables(environment.parse(text))
            except TemplateError as error:
                raise ConfigError(f"the chat template is not valid: {error}") from error
            self.takes_tools = self.takes_tools or "tools" in names

    @classmethod
    def read(cls, directory: Path, settings: Mapping[str, Any], path: Path | None = None) -> ChatTemplate:
        """The template of a tokenizer's directory. path: a file to use instead. Raises ConfigError."""
        file = path or (directory / FILE if (directory / FILE).is_file() else None)
        if file is None:
            return cls(sources_in(settings), settings)
        try:
            return cls({"default": file.read_text(encoding="utf-8")}, settings)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"chat template {file} cannot be read: {error}") from error

    def render(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] = (),
        most: int = MOST,
        variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> str:
        """The prompt, ready for the assistant's answer. Raises RequestError. most: maximum number of
        characters. Tools, calls and results that the template does not know become text.
        """
        has_calls = any(message.get("tool_calls") or message.get("role") == "tool" for message in messages)
        if not self.takes_tools and (tools or (has_calls and not self._shows_calls)):
            messages, tools = with_tools_as_text(messages, tools, not tools or self._has_system), ()
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        template = self._templates.get(name)
        if template is None:
            raise RequestError("this model has no chat template: send a plain prompt")
        return self._filled(template, {**variables, "messages": messages, "tools": list(tools) or None}, most)

    def _filled(self, template: Template, variables: Mapping[str, Any], most: int = MOST) -> str:
        try:
            pieces = template.generate({"add_generation_prompt": True, **self._tokens, **variables})
            return "".join(_within(most, pieces))
        except TemplateError as error:
            raise RequestError(f"the chat template cannot render these messages: {error}") from error
        except (TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
            # Any error in a template's expressions: its author did not expect such messages.
            raise RequestError(
                f"the chat template cannot render these messages: {type(error).__name__}"
            ) from error

    @cached_property
    def _has_system(self) -> bool:
        """Whether the template shows a system message: Gemma 2's refuses one, and others leave it out."""
        template, mark = self._templates.get("default"), "0f2c9a"
        messages = [{"role": "system", "content": mark}, {"role": "user", "content": "-"}]
        with suppress(RequestError):
            return template is None or mark in self._filled(template, {"messages": messages, "tools": None})
        return False


def up_to_last_message(text: str, messages: Messages) -> str:
    """A rendered chat up to the end of its last message's content. Raises RequestError if that is missing."""
    content = str(messages[-1].get("content") or "")
    at = text.rfind(content.strip()) if content.strip() else -1
    if at < 0:
        raise RequestError("continue_final_message needs a last message with a text that the template shows")
    whole = content.lstrip()  # templates may strip the content
    return text[: at + len(whole if text.startswith(whole, at) else whole.rstrip())]


def sources_in(settings: Mapping[str, Any]) -> dict[str, str]:
    """The templates in a tokenizer_config.json, by name. Empty if there are none."""
    found = settings.get("chat_template")
    if isinstance(found, list):
        return {str(one.get("name")): str(one.get("template")) for one in found if isinstance(one, dict)}
    return {"default": found} if found and isinstance(found, str) else {}


def _within(most: int, pieces: Iterable[str]) -> Iterator[str]:
    for piece in pieces:
        most -= len(piece)
        if most < 0:
            raise TextTooLongError("the chat template makes too long a text of these messages")
        yield piece


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **how: Any) -> str:
    if indent is None:
        return json.dumps(value, ensure_ascii=ensure_ascii, **how)
    return "".join(
        _within(MOST, json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, **how).iterencode(value))
    )


def _raise(text: str) -> None:
    raise TemplateError(text)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
