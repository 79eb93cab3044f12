"""Constraints on an output: JSON schemas as a model should follow them, and choices of texts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

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
