"""Constraints on an output: JSON schemas as a model should follow them, choices of texts, and grammars of
llguidance: also of what follows reasoning, and of structural tags.
"""

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


def choice_pattern(texts: Sequence[str]) -> str:
    """A regular expression that matches each of these texts, and no other."""
    return "|".join(SPECIAL.sub(r"\\\g<0>", text) for text in texts)


TokenId = Callable[[str], int | None]
"""The id of a text that is one special token, which a model then writes as that token only."""
MARK = re.compile(r"(<[^<>\s]{1,64}>|\[/?[A-Z_]{1,32}\])")
# JSON allows any white space between tokens, and small models then write nothing else. A schema's own
# x-guidance takes precedence.
COMPACT: Any = {"whitespace_flexible": False}
# Formats of structural tags with their fields.
OF_TAGS = ("tags", "at_least_one", "stop_after_first")
MOST = 1000  # elements of a list in a structural tag
LONGEST = 2**21  # characters of a structural tag's grammar, parts of parts counted again
FORMATS = {"const_string": ["value"], "json_schema": ["json_schema"], "regex": ["pattern"], "any_text": []}
FORMATS |= {"grammar": ["grammar"], "tag": ["begin", "content", "end"], "sequence": ["elements"]}
FORMATS |= {"or": ["elements"], "triggered_tags": ["triggers", *OF_TAGS]}
FORMATS |= {"tags_with_separator": ["separator", *OF_TAGS]}


def grammar_of(kind: str, text: str, token_id: TokenId) -> str:
    """A guide as a grammar of llguidance: Lark, or JSON. Raises RequestError, and errors of llguidance."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if kind in ("json", "json_schema"):
        schema = closed(json.loads(text)) if kind == "json_schema" else {}
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), COMPACT)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "structural_tag":
        return structural_tag(text, token_id)
    return gbnf_to_lark(text) if kind == "ebnf_grammar" else text


def _grammars(kind: str, text: str, token_id: TokenId) -> list[dict[str, Any]]:
    """The same in llguidance's JSON form. The first one is the start."""
    made = grammar_of(kind, text, token_id)
    return list(json.loads(made)["grammars"]) if made.lstrip()[:1] == "{" else [{"lark_grammar": made}]


def after_thinking(guide: Guide, thinking: Thinking, opened: bool, token_id: TokenId) -> Guide:
    """The same, for what follows the reasoning. opened: the output begins within it. Raises RequestError."""
    rules = Rules(token_id)
    thought = f"({' | '.join(map(rules.up_to, thinking.ends))})"
    if thinking.inner:
        parts = ("<|channel|>analysis<|message|>", "<|start|>assistant", "<|channel|>final<|message|>")
        begun, again, final = map(rules.literal, parts)
        start = f"({begun} {thought} {again})? {final} @answer"
    else:
        begun = f"({' | '.join(map(rules.literal, thinking.starts))})"
        start = rf"{thought} /\s*/ @answer" if opened else rf"({begun} {thought} /\s*/)? @answer"
    return _around(rules.lark(start), "answer", guide, token_id)


def or_calls(guide: Guide, call: dict[str, Any], marks: Mapping[str, str], token_id: TokenId) -> Guide:
    """The same, or calls of tools instead. call: JSON schema of one. marks: what may be before it, and what
    is then behind it. Raises RequestError.
    """
    rules = Rules(token_id)
    begun = [rf"({rules.literal(mark)} /\s*/ call /\s*/ {rules.literal(marks[mark])})+" for mark in marks]
    spaced = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
    found = json.dumps({"x-guidance": spaced} | closed(call))
    lark = rules.lark(" | ".join(["@format", "call", *begun]))
    return _around(f"{lark}\ncall: %json {found}\n", "format", guide, token_id)


def _around(lark: str, name: str, guide: Guide, token_id: TokenId) -> Guide:
    """A grammar that refers to the guide by this name. Raises RequestError."""
    try:
        inner = _grammars(guide.type, guide.text, token_id)
        inner[0]["name"] = name
    except Exception as error:  # llguidance has no exception class of its own
        raise RequestError(f"guided_decoding_guide is not a valid {guide.type}: {error}") from None
    return Guide("llguidance", json.dumps({"grammars": [{"lark_grammar": lark}, *inner]}))


class Rules:
    """Rules of a Lark grammar in llguidance's dialect. others: grammars that they refer to by @name."""

    def __init__(self, token_id: TokenId) -> None:
        self._token_id = token_id
        self._rules = {"": r"TEXT: /(.|\n)*/"}
        self.others: list[dict[str, Any]] = []
        self._size = 0

    def lark(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._rules.values()])

    def counted(self, text: str) -> str:
        """The text. Raises RequestError if the grammar grows too long: content is repeated for each end."""
        self._size += 100 + len(text)
        if self._size > LONGEST:
            raise RequestError("structural_tag: it is too large: give its tags fewer formats or ends")
        return text

    def literal(self, text: str) -> str:
        return " ".join(map(self._part, filter(None, MARK.split(text)))) or '""'

    def up_to(self, text: str) -> str:
        """Any text, and this one."""
        first, *rest = filter(None, MARK.split(text))
        if self._part(first).startswith("<"):
            return f"TEXT {self.literal(text)}"
        rule = self._rules.setdefault(first, f"up_{len(self._rules)}[lazy]: TEXT {json.dumps(first)}")
        return " ".join([rule.partition("[")[0], *map(self._part, rest)])

    def _part(self, text: str) -> str:
        found = self._token_id(text) if MARK.fullmatch(text) else None
        return json.dumps(text) if found is None else f"<[{found}]>"


def structural_tag(text: str, token_id: TokenId) -> str:
    """Free text with parts that are bound, in vLLM's and SGLang's forms. Raises RequestError, ValueError."""
    given = json.loads(text)
    form = given.get("format") if isinstance(given, dict) else None
    if form is None:  # the older form
        tags = [
            {"begin": _get(one, "begin", str), "end": _get(one, "end", str)}
            | {"content": {"type": "json_schema", "json_schema": _get(one, "schema", dict)}}
            for one in _get(given, "structures", list)
        ]
        form = {"type": "triggered_tags", "triggers": given.get("triggers"), "tags": tags}
    rules = Rules(token_id)
    lark = rules.lark(_format(rules, form))
    return json.dumps({"grammars": [{"lark_grammar": lark}, *rules.others]})


def _get(form: Any, name: str, kind: type[Any]) -> Any:
    found = form.get(name) if isinstance(form, dict) else None
    if not isinstance(found, kind) or found == []:
        what = "a text" if kind is str else "an object" if kind is dict else "a list that is not empty"
        raise RequestError(f"structural_tag: {name} must be {what}, got {str(found)[:80]!r}")
    if isinstance(found, list) and len(found) > MOST:
        raise RequestError(f"structural_tag: {name} may have at most {MOST} elements, got {len(found)}")
    return found


def _format(rules: Rules, form: Any, end: str = "") -> str:
    """What a format allows, and then the text `end`."""
    kind = _get(form, "type", str)
    if kind not in FORMATS:
        raise RequestError(f"structural_tag: type must be one of {', '.join(FORMATS)}, got {kind[:40]!r}")
    other = next((name for name in form.keys() - {"type", *FORMATS[kind]} if form[name]), None)
    if other is not None:
        raise RequestError(f"structural_tag: {other[:40]} of {kind} is not supported: leave it out")
    free = rules.up_to(end) if end else "TEXT"
    closing = f" {rules.literal(end)}" if end else ""
    if kind == "any_text":
        made = free
    elif kind == "sequence":
        made = _sequence(rules, _get(form, "elements", list), end)
    elif kind == "triggered_tags":
        made = _triggered(rules, form, free, closing)
    else:
        made = _bound(rules, kind, form) + closing
    return rules.counted(made)


def _bound(rules: Rules, kind: str, form: Mapping[str, Any]) -> str:
    if kind == "const_string":
        return rules.literal(_get(form, "value", str))
    if kind == "json_schema":
        schema = {} if form.get("json_schema") is True else _get(form, "json_schema", dict)
        return f"%json {json.dumps({'x-guidance': COMPACT, **closed(schema)})}"
    if kind in ("regex", "grammar"):
        guide = "regex" if kind == "regex" else "ebnf_grammar"
        text = rules.counted(_get(form, FORMATS[kind][0], str))
        [found] = _grammars(guide, text, lambda text: None)
        rules.others.append({**found, "name": f"other_{len(rules.others)}"})
        return f"@{rules.others[-1]['name']}"
    if kind == "or":
        return f"({' | '.join(_format(rules, one) for one in _get(form, 'elements', list))})"
    if kind == "tag":
        several = isinstance(form.get("end"), list)
        ends = _get(form, "end", list) if several else [_get(form, "end", str)]
        made = " | ".join(_format(rules, form.get("content"), str(end)) for end in ends)
        return f"{rules.literal(_get(form, 'begin', str))} ({made})"
    tags = f"({' | '.join(_bound(rules, 'tag', tag) for tag in _get(form, 'tags', list))})"
    more = "" if form.get("stop_after_first") else f" ({rules.literal(_get(form, 'separator', str))} {tags})*"
    return f"({tags}{more})" if form.get("at_least_one") else f"({tags}{more})?"


def _triggered(rules: Rules, form: Mapping[str, Any], free: str, closing: str) -> str:
    choices, triggers = [], [str(one) for one in _get(form, "triggers", list) if one]
    for tag in _get(form, "tags", list):
        begin = _get(tag, "begin", str)
        first = next((one for one in triggers if begin.startswith(one)), None)
        if first is None:
            raise RequestError(f"structural_tag: none of the triggers begins {begin[:80]!r}")
        rest = _bound(rules, "tag", {**tag, "begin": begin[len(first) :]})
        choices.append(f"{rules.up_to(first)} {rest}")
    tags, needed = f"({' | '.join(choices)})", form.get("at_least_one")
    if form.get("stop_after_first"):
        return f"{tags}{closing}" if needed else f"({tags}{closing} | {free})"
    return f"{tags}{'+' if needed else '*'} {free}"


def _sequence(rules: Rules, elements: list[Any], end: str) -> str:
    """Free text in it ends at the constant that follows."""
    made, at = [], 0
    while at < len(elements):
        one, at = elements[at], at + 1
        following = end if at == len(elements) else ""
        if at < len(elements) and isinstance(one, dict) and one.get("type") in ("any_text", "triggered_tags"):
            following, at = _get(elements[at], "value", str), at + 1
            following += end if at == len(elements) else ""
        made.append(_format(rules, one, following))
    return " ".join(made)
