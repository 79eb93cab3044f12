"""Texts of tensors."""

from __future__ import annotations

from manylora.errors import RequestError


def utf8(value: bytes | str, name: str) -> str:
    """One value of a text tensor. name: as the client knows the input. Raises RequestError."""
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        raise RequestError(f"{name} must be valid UTF-8") from None
