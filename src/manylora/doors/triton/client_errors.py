"""Error messages for clients: one sentence, never a stack trace."""

from __future__ import annotations

import json
import logging
import re

from manylora.doors.triton.tensor_table import MODELS
from manylora.errors import ManyloraError, RequestError, printable

WHOLE = "context_and_generation"
INPUTS = re.compile(r"lora_\w+|pooling|classification_head|embedding_request")
"""Names that change an answer and are inputs wherever they are supported. HTTP's `generate` turns every field
that is not an input of the model into a parameter.
"""
ADAPTER = re.compile(r"loras?|lora_(?:(?:int_)?id|model|request|adapters?)|adapters?|adapter_\w+|model")
"""Names that mean an adapter on other servers."""
SERVERS_OWN = re.compile(
    r"triton_\w+|sequence_\w+|binary_data_output|priority|timeout|request_type|stream|traceparent|tracestate"
)
"""Parameters that Triton and its front ends add to a request's own."""
EXPECTED = ("Streaming",)  # TensorRT-LLM's client sends it
MOST_LOGGED = 64  # names of other parameters

logger = logging.getLogger("manylora")
_logged: set[str] = set()


def client_message(error: Exception, model: str) -> str:
    """The text for the client. An unexpected error is logged with its stack trace."""
    if isinstance(error, ManyloraError):
        return str(error)
    logger.error("%s failed", model, exc_info=error)
    return f"{model} failed on this request: {type(error).__name__}"


def client_error(error: Exception, model: str) -> RequestError:
    """The same, for an error that has its own kind."""
    return error if isinstance(error, RequestError) else RequestError(client_message(error, model))


def check_parameters(parameters: str, *, log: bool = True) -> None:
    """Raises RequestError as `check_phase`, and for an adapter or a kind of output for which the model has no
    input. Others are ignored, as they may be meant for other programs, and logged once.

    parameters: JSON, as given by Triton. log: false in a step of an ensemble beside the engine's.
    """
    check_phase(parameters)
    for name, value in json.loads(parameters or "{}").items() if len(parameters) > 2 else ():
        if ADAPTER.fullmatch(name) and not (name == "model" and value in list(MODELS)):
            raise RequestError(adapter_hint(name))
        if INPUTS.fullmatch(name):
            takers = [model for model, spec in MODELS.items() if any(one.name == name for one in spec.inputs)]
            told = "send what takes its place: no model has it"
            told = f"ask {' or '.join(takers)} with it" if takers else told
            raise RequestError(
                f"{name:.80} is no input of this model, and as a request parameter it would be ignored: "
                f"leave it out, or {told}"
            )
        is_known = SERVERS_OWN.fullmatch(name) or name in (*EXPECTED, *_logged)
        if log and not is_known and len(_logged) < MOST_LOGGED:
            _logged.add(name)
            logger.warning(
                "a request has %s, which is no input of its model: it is ignored, and not logged again",
                printable(name),
            )


def adapter_hint(name: str) -> str:
    """The refusal of a field that means an adapter elsewhere."""
    return (
        f"{name:.80} is no input of this model, and the base model would answer: name the adapter in "
        "lora_name, or its id in lora_task_id (llmapi: lora_id); for vllm_model lora_name belongs in "
        "sampling_parameters"
    )


def check_phase(parameters: str) -> None:
    """Raises RequestError for a request for one phase only, prefill or decode. parameters: Triton's JSON."""
    if "request_type" not in parameters:  # fast path: most requests have none
        return
    kind = json.loads(parameters).get("request_type", WHOLE)
    if kind != WHOLE:
        raise RequestError(
            f"request parameter request_type {kind!r:.80} is not supported by this server: leave it out, or "
            f"send {WHOLE!r}"
        )
