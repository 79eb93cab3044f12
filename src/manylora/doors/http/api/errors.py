"""ApiError: an error with HTTP status, stable code and message, and the conversion of others to it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from manylora import errors
from manylora.adapters.catalog.entry import CatalogError, unusable
from manylora.adapters.catalog.names import is_name
from manylora.errors import AdapterError, RequestError

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}

# Of errors of the catalog; 422 for the others, which say what is wrong with an adapter.
CATALOG_STATUS = {
    **dict.fromkeys(("adapter_exists", "alias_circle", "invalid_adapter_name", "invalid_value"), 400),
    "unsupported_field": 400,
    "not_allowed": 403,
    "adapter_not_found": 404,
    "no_room_to_pin": 409,
    "request_too_large": 413,
    **dict.fromkeys(("adapter_changing", "adapter_unreadable", "adapters_busy", "adapter_cache_busy"), 503),
    "storage_full": 507,
}
FORMAT = "response_format"  # named in errors about guided decoding; `renamed` translates it
SERVER_FAULT_PREFIXES = ("The model's logits", "Encountered an error in", "The adapter could not be read")


class ApiError(RequestError):
    """code: for programs. message: for people, without this server's paths. retry_after: seconds."""

    def __init__(
        self, status: int, code: str, message: str, param: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.param = status, code, message, param
        self.retry_after = retry_after

    @property
    def headers(self) -> dict[str, str]:
        found = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return found | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})

    def body(self) -> dict[str, Any]:
        """The error object of the OpenAI API."""
        kind = ERROR_TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def event(self) -> bytes:
        """The error object as a server-sent event, for a stream that has already begun."""
        return f"data: {json.dumps(self.body(), ensure_ascii=False)}\n\n".encode()


def invalid_value(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, "invalid_value", message, param)


def unsupported_field(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, "unsupported_field", message, param)


def adapter_cache_busy() -> ApiError:
    return ApiError(503, "adapter_cache_busy", "The adapter cache is too busy, try again", retry_after=1)


def queue_full() -> ApiError:
    return ApiError(429, "overloaded", "Too many requests wait already, try again", retry_after=1)


def client_left() -> ApiError:
    return ApiError(499, "client_left", "The client has closed the connection")


def context_length(num_tokens: int) -> str:
    """Start of the message about a prompt that is too long. Clients recognise OpenAI's first words."""
    return f"This model's maximum context length is {num_tokens} tokens"


def adapter_problem(name: str, reason: str) -> ApiError:
    """An adapter that exists but cannot be used."""
    return as_api_error(unusable(name, reason))


def as_api_error(error: Exception, adapter: str = "") -> ApiError:
    """Any exception as the error that the client gets. adapter: the name that the request used."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, CatalogError):
        status = CATALOG_STATUS.get(error.code, 422)
        return ApiError(status, error.code, error.message, error.param, error.retry_after)
    if isinstance(error, AdapterError):
        if isinstance(error, errors.AdapterNotFoundError):
            return ApiError(404, "adapter_not_found", f"adapter {adapter!r} does not exist", "model")
        if isinstance(error, errors.AdapterNotCachedError):
            return ApiError(409, "adapter_not_cached", f"adapter {adapter!r} is not in the cache", "model")
        if isinstance(error, errors.AdapterInvalidError):
            return adapter_problem(adapter, str(error))
        code, reason = "adapter_broken", str(error)
        if isinstance(error, errors.AdapterCacheFullError):
            code, reason = "adapter_too_large", "it needs more room than the adapter cache has"
        return ApiError(422, code, f"adapter {adapter!r} cannot be served: {reason}", "model")
    if isinstance(error, errors.QueueFullError):
        return ApiError(429, "overloaded", str(error), retry_after=1)
    if isinstance(error, errors.DrainingError):
        return ApiError(503, "stopping", str(error), retry_after=5)
    if isinstance(error, errors.SleepingError):
        return ApiError(503, "sleeping", str(error), retry_after=5)
    if isinstance(error, errors.EngineDeadError):
        return ApiError(503, "engine_dead", str(error))
    if isinstance(error, RequestError) and str(error).startswith(SERVER_FAULT_PREFIXES):
        return ApiError(500, "engine_error", str(error))
    if isinstance(error, RequestError | ValueError):
        if str(error).startswith("guided_decoding"):
            reason = str(error).replace("guided_decoding_guide", FORMAT)
            return ApiError(400, "invalid_response_format", reason, FORMAT)
        return invalid_value(str(error))
    return ApiError(500, "internal_error", "The server failed to answer this request")


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """The same error for a client whose API has other field names. names: the client's names, by field."""
    head, dot, tail = (error.param or "").partition(".")
    if names.get(head, head) == head:
        return error
    param = names[head] + dot + tail
    message = error.message.replace(error.param or "", param, 1)
    return ApiError(error.status, error.code, message, param, error.retry_after)


def check_name(name: str, param: str) -> str:
    """Return the name if it is valid. Raises ApiError. param: the field that contains it."""
    if not is_name(name):
        reason = (
            f"{param}: a name has 1 to 128 of the characters A-Z a-z 0-9 . _ : / - and is no absolute path, "
        )
        reason += "nor has it a '..' (GET /v1/models lists the names)"
        raise ApiError(400, "invalid_adapter_name", reason, param)
    return name
