"""Refuses a value that cannot work."""

from __future__ import annotations

from manylora.errors import RequestError


def require(ok: bool, name: str, rule: str, value: object) -> None:
    """Raises RequestError unless ok."""
    if not ok:
        raise RequestError(f"{name} {rule}, got {value}")
