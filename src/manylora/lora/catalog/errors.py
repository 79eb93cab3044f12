"""CatalogError: why an adapter cannot be served, loaded or changed, with a stable code for programs."""

from __future__ import annotations

import re

from manylora.errors import RequestError

# Adapter readers raise a single exception type. The first pattern that matches its message gives the error
# code.
ADAPTER_CODES = (
    ("adapter_too_large", r"too large for the LoRA cache"),
    ("adapter_rank_too_large", r"low_rank|rank .*(limit|larger)"),
    (
        "adapter_wrong_base",
        r"another model|of this model|enabled for this model|numModelLayers|in the base model",
    ),
    ("adapter_unsupported", r"support|would be|pickle|not served|cannot be served"),
)


class CatalogError(RequestError):
    """code: stable, for programs. message: for people, without paths of this server. param: the field of a
    request that is wrong. retry_after: seconds after which it may work; None: it will not.
    """

    def __init__(
        self, code: str, message: str, param: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.code, self.message, self.param, self.retry_after = code, message, param, retry_after


def unusable(name: str, reason: str) -> CatalogError:
    """An adapter that exists but cannot be used."""
    code = next((code for code, pattern in ADAPTER_CODES if re.search(pattern, reason)), "adapter_broken")
    return CatalogError(code, f"adapter {name!r} cannot be served: {reason}", "model")


def not_found(name: str, field: str) -> CatalogError:
    """field: of the request, that names it."""
    return CatalogError("adapter_not_found", f"adapter {name!r} does not exist", field)
