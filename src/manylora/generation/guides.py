"""Constraints on an output: JSON schemas as a model should follow them, and choices of texts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from manylora.errors import RequestError
from manylora.generation.reply_formats import Thinking
from manylora.request import Guide

# Where a schema contains other schemas: by name, in a list, single.
MAPS = ("properties", "patternProperties", "$defs", "definitions")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
SINGLE = ("items", "additionalProperties", "contains")
COMBINING = ("allOf", "anyOf", "oneOf", "not", "if", "$ref", "dependentSchemas")
DECIDED = ("additionalProperties", "patternProperties", "unevaluatedProperties")

LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
LARGEST = {"number": 10**15, "integer": 9 * 10**18}  # 64 bits hold any such integer
SMALLEST = 1e-9  # nine decimals
SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$]")  # characters of a regular expression
MOST_NUMBERS = 100  # each takes a millisecond or two to compile
COARSE = 1e-6  # finer bounds may need more decimals


def closed(schema: Any) -> Any:
    """The same schema, so that a model cannot invent keys or write digits without end: an object with
    `properties` allows no other keys unless it says so, and a number without bounds is at most LARGEST and a
    multiple of SMALLEST, unless there are more than MOST_NUMBERS. Where a schema combines several objects
    (COMBINING or `allOf`), they stay open: a key that is unknown to one part may belong to another.
    """
    text = str(schema)
    few = sum(text.count(repr(kind)) for kind in LARGEST) <= MOST_NUMBERS
    return _close(schema, not _combines(schema), few)


def _close(schema: Any, objects: bool, numbers: bool) -> Any:
    """objects: whether they are closed. numbers: whether they are limited."""
    if not isinstance(schema, Mapping):
        return schema
    found = _limited(schema) if numbers else dict(schema)
    for name, value in schema.items():
        if name in MAPS and isinstance(value, Mapping):
            found[name] = {key: _close(one, objects, numbers) for key, one in value.items()}
        elif name in LISTS and isinstance(value, list):
            found[name] = [_close(one, objects, numbers) for one in value]
        elif name in SINGLE:
            found[name] = _close(value, objects, numbers)
    has_keys = isinstance(schema.get("properties"), Mapping)
    if objects and has_keys and not any(name in schema for name in DECIDED):
        found["additionalProperties"] = False
    return found


def _limited(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with the bounds that its numbers lack."""
    found, types = dict(schema), schema.get("type")
    types = types if isinstance(types, list) else [types]
    kind = next((one for one in LARGEST if one in types), None)
    bounds = [schema[name] for name in (*LOWER, *UPPER) if type(schema.get(name)) in (int, float)]
    if kind is None or "enum" in schema or "const" in schema:
        return found
    if not any(name in schema for name in LOWER) and all(one > -LARGEST[kind] for one in bounds):
        found["minimum"] = -LARGEST[kind]
    if not any(name in schema for name in UPPER) and all(one < LARGEST[kind] for one in bounds):
        found["maximum"] = LARGEST[kind]
    is_coarse = all(one == 0 or abs(one) >= COARSE for one in bounds) and (
        not bounds or len(bounds) == 1 or max(bounds) - min(bounds) >= COARSE
    )
    if kind == "number" and is_coarse:
        found.setdefault("multipleOf", SMALLEST)
    return found


def _combines(schema: Any) -> bool:
    """Whether any part of it combines several objects."""
    if isinstance(schema, list):
        return any(_combines(one) for one in schema)
    if not isinstance(schema, Mapping):
        return False
    parts = schema.get("allOf")
    if isinstance(parts, list) and len(parts) > 1:
        return True
    if "properties" in schema and any(name in schema for name in COMBINING):
        return True
    inner = [value for name, value in schema.items() if name in (*LISTS, *SINGLE)]
    for name in MAPS:
        inner += schema[name].values() if isinstance(schema.get(name), Mapping) else []
    return any(_combines(one) for one in inner)


def json_guide(schema: dict[str, Any]) -> Guide:
    return Guide("json_schema", json.dumps(schema))


ANYTHING = r"(.|\n)*"


def after_thinking(
    guide: Guide, thinking: Thinking, opened: bool, token_id: Callable[[str], int | None]
) -> Guide:
    """The same, for what follows the reasoning. opened: the output begins within it. token_id: of a text that
    is one token. Raises RequestError.
    """

    def mark(text: str) -> str:
        found = token_id(text)
        return json.dumps(text) if found is None else f"<[{found}]>"

    def any_of(texts: Sequence[str]) -> str:
        return f"({' | '.join(map(mark, texts))})"

    tokens = any(token_id(end) is not None for end in thinking.ends)
    pattern = f"{ANYTHING}({choice_pattern(thinking.ends)})".replace("/", r"\/")
    rules = [f"ANY: /{ANYTHING}/", r"SPACE: /\s*/"]
    rules.append(f"thought: ANY {any_of(thinking.ends)}" if tokens else f"thought[lazy]: /{pattern}/")
    if thinking.inner:
        channel, message = mark("<|channel|>"), mark("<|message|>")
        first = f'({channel} "analysis" {message} thought {mark("<|start|>")} "assistant")?'
        rules.append(f'start: {first} {channel} "final" {message} @answer')
    else:
        begun = "" if opened else f"{any_of(thinking.starts)} "
        rules.append(f"start: {'' if opened else '('}{begun}thought SPACE{'' if opened else ')?'} @answer")
    answer = [{**one, "name": "answer"} if i == 0 else one for i, one in enumerate(grammars_of(guide))]
    return Guide("llguidance", json.dumps({"grammars": [{"lark_grammar": "\n".join(rules)}, *answer]}))


def grammars_of(guide: Guide) -> list[dict[str, Any]]:
    """The guide as grammars in llguidance's JSON form; the first is the start. Raises RequestError."""
    try:
        if guide.type == "llguidance":
            return list(json.loads(guide.text)["grammars"])
        if guide.type in ("json", "json_schema"):
            schema = closed(json.loads(guide.text)) if guide.type == "json_schema" else {}
            return [{"json_schema": {"x-guidance": {"whitespace_flexible": False}, **schema}}]
        if guide.type == "ebnf_grammar":
            from llguidance.gbnf_to_lark import gbnf_to_lark

            return [{"lark_grammar": gbnf_to_lark(guide.text)}]
    except Exception as error:  # the converter raises any
        raise RequestError(f"guided_decoding_guide is not a valid {guide.type}: {error}") from None
    if guide.type == "regex":
        return [{"lark_grammar": "start: /" + re.sub(r"(?<!\\)/", r"\\/", guide.text) + "/"}]
    return [{"lark_grammar": guide.text}]


def choice_pattern(texts: Sequence[str]) -> str:
    """A regular expression that matches each of these texts, and no other."""
    return "|".join(SPECIAL.sub(r"\\\g<0>", text) for text in texts)
