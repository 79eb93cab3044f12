"""Texts of tensors."""

from __future__ import annotations

import json
from typing import Any

from manylora.errors import RequestError


def utf8(value: bytes | str, name: str) -> str:
    """One value of a text tensor. name: as the client knows the input. Raises RequestError."""
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        raise RequestError(f"{name} must be valid UTF-8") from None


def is_unicode(value: Any) -> bool:
    """Whether no text in a value of JSON has half of a surrogate pair, as an escape can make one."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
