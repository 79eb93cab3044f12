"""What a client is told of a failure: the sentence of an error raised on purpose, never a stack trace."""

from __future__ import annotations

import json
import logging

from manylora.errors import ManyloraError, RequestError

__all__ = ["check_parameters", "client_message"]

WHOLE = "context_and_generation"

logger = logging.getLogger("manylora")


def client_message(error: Exception, model: str) -> str:
    """For the client. What nobody thought of is written to the server's log whole."""
    if isinstance(error, ManyloraError):
        return str(error)
    logger.error("%s failed", model, exc_info=error)
    return f"{model} failed on this request: {type(error).__name__}"


def check_parameters(parameters: str) -> None:
    """Raises RequestError for a parameter of a request that asks for what is not done here: half of a
    generation, for another server to go on from. Others, which may be anybody's, are let pass.

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
