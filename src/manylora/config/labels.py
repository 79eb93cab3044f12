"""What config.json says of a classification head's labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DEFAULT_LABELS = 2  # what transformers takes where config.json names none


def num_labels(raw: Mapping[str, Any]) -> int:
    """raw: config.json."""
    names = raw.get("id2label")
    return len(names) if names else int(raw.get("num_labels") or DEFAULT_LABELS)


def label_names(raw: Mapping[str, Any], count: int) -> tuple[str, ...]:
    """Of so many labels; those of config.json, where it has as many."""
    named = raw.get("id2label") or {}
    plain = tuple(f"LABEL_{number}" for number in range(count))
    if len(named) != count:
        return plain
    return tuple(str(named.get(str(number), plain[number])) for number in range(count))
