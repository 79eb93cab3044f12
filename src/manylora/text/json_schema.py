"""Closes objects in a JSON schema, for guided decoding. Otherwise a model could invent keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Where a schema contains other schemas: by name, in a list, single.
MAPS = ("properties", "patternProperties", "$defs", "definitions")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
SINGLE = ("items", "additionalProperties", "contains")
COMBINING = ("allOf", "anyOf", "oneOf", "not", "if", "$ref", "dependentSchemas")
DECIDED = ("additionalProperties", "patternProperties", "unevaluatedProperties")


def closed(schema: Any) -> Any:
    """The same schema, in which an object with `properties` allows no other keys unless it says so.

    A schema that combines several objects (a keyword of COMBINING beside `properties`, or `allOf` with more
    than one) is not changed: a key that is unknown to one part may belong to another.
    """
    return schema if _combines(schema) else _close(schema)


def _close(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    found = dict(schema)
    for name, value in schema.items():
        if name in MAPS and isinstance(value, Mapping):
            found[name] = {key: _close(one) for key, one in value.items()}
        elif name in LISTS and isinstance(value, list):
            found[name] = [_close(one) for one in value]
        elif name in SINGLE:
            found[name] = _close(value)
    if isinstance(schema.get("properties"), Mapping) and not any(name in schema for name in DECIDED):
        found["additionalProperties"] = False
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
