"""Names of adapters, as requests give them."""

from __future__ import annotations

from manylora.lora.library.names import is_name
from manylora.openai.api.errors import ApiError


def check_name(name: str, param: str) -> str:
    """Return the name if it is valid. Raises ApiError. param: the field that contains it."""
    if not is_name(name):
        raise ApiError(
            400,
            "invalid_adapter_name",
            f"{param}: a name has 1 to 128 of the characters A-Z a-z 0-9 . _ : / - and is no absolute path, "
            "nor has it a '..' (GET /v1/models lists the names)",
            param,
        )
    return name
