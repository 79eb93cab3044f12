"""Error messages for clients: one sentence, never a stack trace."""

from __future__ import annotations

import json
import logging
import re

from manylora.errors import ManyloraError, RequestError
from manylora.wire.tensor_table import MODELS

WHOLE = "context_and_generation"
INPUTS = re.compile(r"lora_\w+|pooling|classification_head|embedding_request")
"""Names that change an answer and are inputs wherever they are supported. HTTP's `generate` turns every field
that is not an input of the model into a parameter.
"""

logger = logging.getLogger("manylora")


def client_message(error: Exception, model: str) -> str:
    """The text for the client. An unexpected error is logged with its stack trace."""
    if isinstance(error, ManyloraError):
        return str(error)
    logger.error("%s failed", model, exc_info=error)
    return f"{model} failed on this request: {type(error).__name__}"


def client_error(error: Exception, model: str) -> RequestError:
    """The same, for an error that has its own kind."""
    return error if isinstance(error, RequestError) else RequestError(client_message(error, model))


def check_parameters(parameters: str) -> None:
    """Raises RequestError as `check_phase`, and for an adapter or a kind of output for which the model has no
    input. Other parameters are ignored, because they may be meant for other programs.

    parameters: JSON, as given by Triton.
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
    """Raises RequestError if a request asks for only one phase of a generation, prefill or decode.

    parameters: JSON, as given by Triton.
    """
    if "request_type" not in parameters:  # fast path: most requests have none
        return
    kind = json.loads(parameters).get("request_type", WHOLE)
    if kind != WHOLE:
        raise RequestError(
            f"request parameter request_type {kind!r:.80} is not supported by this server: leave it out, or "
            f"send {WHOLE!r}"
        )
