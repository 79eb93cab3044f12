"""Output constraints of a request body: tools, response_format, and the fields of vLLM and SGLang."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from manylora.errors import RequestError
from manylora.generation.guides import choice_pattern, json_guide
from manylora.openai.api.errors import FORMAT, ApiError, as_api_error, invalid_value, renamed
from manylora.openai.api.fields import StructuredOutputs
from manylora.openai.api.parsing import check_size
from manylora.openai.api.schema import ChatRequest, GenerationRequest, ResponseFormat
from manylora.openai.api.tools import tool_use
from manylora.request import Guide

FORMATS = {  # response_format type -> the engine's guide type, and the field with the text
    "regex": ("regex", "regex"),
    "ebnf": ("ebnf_grammar", "ebnf"),
    "lark_grammar": ("lark_grammar", "lark_grammar"),
    "llguidance": ("llguidance", "grammar"),
}
SOME_SPACE = r"[ \n\t]{0,20}"  # without a limit, small models write nothing else
ANY_OBJECT = {"type": "object"}
OF_STRUCTURED = ("json_", "regex", "choice", "grammar", "json_object")


def guide_of(body: GenerationRequest) -> tuple[str, Guide | None]:
    """The field that constrains the output, and its guide. None: free text. Raises ApiError, also if two
    fields constrain it.
    """
    use = tool_use(body) if isinstance(body, ChatRequest) else None
    made = [(field, _made(field, make)) for field, make in _wanted(body)]
    found = [(field, guide) for field, guide in made if guide is not None]
    if use is not None:
        # If only tool calls are allowed, a text format has no effect. Some clients send both.
        found = [one for one in found if not (use.only_calls and one[0] == FORMAT)]
        if found:
            reason = f"tools and {found[0][0]} cannot be combined: leave one out"
            raise invalid_value(reason, found[0][0])
        return "tools", _made("tools", use.guide)
    if len(found) > 1:
        reason = f"{found[0][0]} and {found[1][0]} both bind the answer: give one"
        raise invalid_value(reason, found[1][0])
    return found[0] if found else (FORMAT, None)


def _made(field: str, make: Callable[[], Guide | None]) -> Guide | None:
    """The guide of a field. Raises ApiError that names the field."""
    try:
        return make()
    except RequestError as error:
        raise renamed(as_api_error(error), {FORMAT: field}) from error


def _wanted(body: GenerationRequest) -> Iterator[tuple[str, Callable[[], Guide | None]]]:
    """Each field that is set, and a function that makes its guide."""
    if body.response_format is not None:
        yield FORMAT, partial(_of_format, body.response_format)
    if body.structured_outputs is not None:
        yield "structured_outputs", partial(_of_structured, body.structured_outputs)
    space = body.guided_whitespace_pattern
    for field, schema in (("guided_json", body.guided_json), ("json_schema", body.json_schema)):
        if schema is not None:
            yield field, partial(_of_schema, schema, field, space)
    for field, pattern in (("guided_regex", body.guided_regex), ("regex", body.regex)):
        if pattern is not None:
            yield field, partial(Guide, "regex", pattern)
    if body.guided_choice is not None:
        yield "guided_choice", partial(Guide, "regex", choice_pattern(body.guided_choice))
    if body.guided_grammar is not None:
        yield "guided_grammar", partial(_of_grammar, body.guided_grammar)
    if body.ebnf is not None:
        yield "ebnf", partial(Guide, "ebnf_grammar", body.ebnf)


def _of_format(wanted: ResponseFormat) -> Guide | None:
    """Raises ApiError if a field that its type requires is missing."""
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return json_guide(ANY_OBJECT)
    if wanted.type == "json_schema":
        schema = wanted.schema_given
        if schema is None:
            reason = "response_format.json_schema.schema is required"
            raise ApiError(400, "missing_field", reason, FORMAT)
        return json_guide(schema)
    kind, field = FORMATS[wanted.type]
    text = getattr(wanted, field)
    if text is None:
        raise ApiError(400, "missing_field", f"{FORMAT}.{field} is required", FORMAT)
    return Guide(kind, text if isinstance(text, str) else json.dumps(text))


def _of_structured(wanted: StructuredOutputs) -> Guide | None:
    given = [name for name in OF_STRUCTURED if getattr(wanted, name) not in (None, False)]
    if len(given) > 1:
        names = " and ".join(name.strip("_") for name in given)
        raise invalid_value(f"structured_outputs: {names} exclude each other: give one", "structured_outputs")
    space = wanted.whitespace_pattern or (None if wanted.disable_any_whitespace else SOME_SPACE)
    if wanted.json_ is not None:
        return _of_schema(wanted.json_, "structured_outputs.json", space)
    if wanted.regex is not None:
        return Guide("regex", wanted.regex)
    if wanted.choice is not None:
        return Guide("regex", choice_pattern(wanted.choice))
    if wanted.grammar is not None:
        return _of_grammar(wanted.grammar)
    return _of_schema(dict(ANY_OBJECT), "", space) if wanted.json_object else None


def _of_schema(schema: str | dict[str, Any], field: str, space: str | None) -> Guide:
    """space: regular expression for white space between JSON tokens. None: no white space."""
    if isinstance(schema, str):
        try:
            check_size(schema.encode())
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise invalid_value(f"{field}: not valid JSON", field) from error
        if not isinstance(schema, dict):
            raise invalid_value(f"{field}: must be a JSON schema", field)
    if space is not None:
        schema = {"x-guidance": {"whitespace_pattern": space}, **schema}
    return json_guide(schema)


def _of_grammar(text: str) -> Guide:
    """EBNF is recognised by `::=`, which Lark does not have."""
    return Guide("ebnf_grammar" if "::=" in text else "lark_grammar", text)
