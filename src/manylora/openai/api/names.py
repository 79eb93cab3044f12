"""Which names adapters may have. They appear in URLs, in file paths and in comma-separated metric labels."""

from __future__ import annotations

import re

from manylora.openai.api.errors import ApiError

NAME = re.compile(r"[A-Za-z0-9._:/-]{1,128}")


def is_name(name: str) -> bool:
    """Whether it is allowed. As a path it has no empty, "." or ".." part: it cannot lead out of a root."""
    parts = name.split("/")
    return bool(NAME.fullmatch(name)) and ".." not in name and "" not in parts and "." not in parts


def check_name(name: str, param: str) -> str:
    """Return the name. Raises ApiError. param: the field that it stands in."""
    if not is_name(name):
        raise ApiError(
            400,
            "invalid_adapter_name",
            f"{param}: an adapter's name has 1 to 128 of the characters A-Z a-z 0-9 . _ : / - and no '..'",
            param,
        )
    return name
