"""What an adapter may be called. Names go into URLs, folders and comma lists of metrics."""

from __future__ import annotations

import re

from manylora.openai.api.errors import ApiError

__all__ = ["check_name", "is_name"]

NAME = re.compile(r"[A-Za-z0-9._:/-]{1,128}")


def is_name(name: str) -> bool:
    """Also relative, without empty parts: a name is never a way out of a root."""
    parts = name.split("/")
    return bool(NAME.fullmatch(name)) and ".." not in name and "" not in parts and "." not in parts


def check_name(name: str, param: str) -> str:
    """The name. Raises ApiError."""
    if not is_name(name):
        raise ApiError(
            400,
            "invalid_adapter_name",
            f"{param}: an adapter's name has 1 to 128 of the characters A-Z a-z 0-9 . _ : / - and no '..'",
            param,
        )
    return name
