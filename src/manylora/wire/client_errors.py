"""Error messages for clients: one sentence, never a stack trace."""

from __future__ import annotations

import json
import logging

from manylora.errors import ManyloraError, RequestError

WHOLE = "context_and_generation"

logger = logging.getLogger("manylora")


def client_message(error: Exception, model: str) -> str:
    """The text for the client. An unexpected error goes to the server's log, with its stack trace."""
    if isinstance(error, ManyloraError):
        return str(error)
    logger.error("%s failed", model, exc_info=error)
    return f"{model} failed on this request: {type(error).__name__}"


def client_error(error: Exception, model: str) -> RequestError:
    """The same, for one that says what kind it is."""
    return error if isinstance(error, RequestError) else RequestError(client_message(error, model))


def check_parameters(parameters: str) -> None:
    """Raises RequestError if a request asks for one phase of a generation only, prefill or decode. Other
    parameters are ignored: they may be meant for other programs.

    parameters: JSON, as Triton gives them.
    """
    if "request_type" not in parameters:  # most have none, and each request comes here
        return
    kind = json.loads(parameters).get("request_type", WHOLE)
    if kind != WHOLE:
        raise RequestError(
            f"request parameter request_type {kind!r:.80} is not supported by this server: leave it out, or "
            f"send {WHOLE!r}"
        )
