"""Error messages for clients: one sentence, never a stack trace."""

from __future__ import annotations

import json
import logging
import re

from manylora.errors import ManyloraError, RequestError
from manylora.wire.tensor_table import MODELS

WHOLE = "context_and_generation"
INPUTS = re.compile(r"lora_\w+|pooling|classification_head|embedding_request")
"""What changes an answer, and is an input wherever it is taken. HTTP's `generate` makes a parameter of each
field that is no input of the model."""

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
    """Raises RequestError for `check_phase`, and for an adapter or a kind of output that the model asked has
    no input for. Other parameters are ignored: they may be meant for other programs.

    parameters: JSON, as Triton gives them.
    """
    check_phase(parameters)
    if INPUTS.search(parameters) is None:
        return
    name = next((key for key in json.loads(parameters) if INPUTS.fullmatch(key)), None)
    if name is None:
        return
    takers = [model for model, spec in MODELS.items() if any(one.name == name for one in spec.inputs)]
    told = f"ask {' or '.join(takers)} with it" if takers else "send what takes its place: no model has it"
    raise RequestError(
        f"{name:.80} is no input of this model, and as a parameter of the request it would be ignored: "
        f"leave it out, or {told}"
    )


def check_phase(parameters: str) -> None:
    """Raises RequestError if a request asks for one phase of a generation only, prefill or decode.

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
