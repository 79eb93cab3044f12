"""The body of llgtrt's /v1/run, and its conversion to a chat or completion."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from manylora.openai.api.errors import FORMAT, invalid_value
from manylora.openai.api.fields import Body, Items
from manylora.openai.api.parsing import validate
from manylora.openai.api.schema import MAX_TOKENS, ChatRequest, CompletionRequest, Message, OneAdapterFields

DEFAULT_TOKENS = 16  # llgtrt's default
NAMES = {FORMAT: "controller_arg.grammar"}  # this API's names for fields of chats and completions


class _ControllerArg(Body):
    """grammar: in llguidance's JSON form."""

    grammar: dict[str, Any]


class RunRequest(OneAdapterFields):
    """Either prompt or messages. The answer is always streamed. The adapter fields are our extension."""

    controller: Literal["llguidance"]
    controller_arg: _ControllerArg
    prompt: str | None = None
    messages: Items[Message] | None = Field(None, min_length=1, max_length=4096)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, ge=0, le=1)
    max_tokens: int = Field(DEFAULT_TOKENS, ge=1, le=MAX_TOKENS)


def generation_request(body: RunRequest) -> ChatRequest | CompletionRequest:
    """Raises ApiError."""
    if body.prompt is not None and body.messages is not None:
        raise invalid_value("prompt and messages cannot be combined: give one of them", "prompt")
    without = {"controller", "controller_arg"}
    given = body.model_dump(exclude=without, exclude_none=True, exclude_unset=True)
    given.setdefault("max_tokens", DEFAULT_TOKENS)
    guide = {"type": "llguidance", "grammar": body.controller_arg.grammar}
    given |= {"stream": True, FORMAT: guide}
    if body.messages is None:
        return validate({"prompt": "", **given}, CompletionRequest)
    return validate(given, ChatRequest)
