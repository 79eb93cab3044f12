"""Texts of tensors."""

from __future__ import annotations

import json
from typing import Any

from manylora.errors import RequestError


def utf8(value: bytes | str, name: str) -> str:
    """One value of a text tensor. name: the client's name of the input. Raises RequestError."""
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        raise RequestError(f"{name} must be valid UTF-8") from None


def is_unicode(value: Any) -> bool:
    """Whether all texts in a JSON value are valid Unicode: an escape can make half of a surrogate pair."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
