"""Truncates chats that are too long: drops the oldest messages until the rest fits."""

from __future__ import annotations

from collections.abc import Sequence

from manylora.openai.api.errors import ApiError, context_length
from manylora.openai.api.params import Limits
from manylora.openai.api.schema import ChatRequest, Message
from manylora.openai.serving.inference import ResolvedRequest
from manylora.openai.serving.prompts import ChatPrompt


async def truncate_messages(
    asked: ResolvedRequest, limits: Limits, body: ChatRequest
) -> tuple[ChatRequest, ChatPrompt]:
    """The body and its prompt, without as many of the oldest messages as necessary.

    The system messages at the start and the last message stay. Raises ApiError if these alone are too long.
    Room is left for the tokens that the body asks for, or for one.
    """
    try:
        return body, await _prompt(asked, limits, body)
    except ApiError as error:
        first = next((i for i, one in enumerate(body.messages) if one.role not in _LEADING), 0)
        if error.code != TOO_LONG or len(body.messages) - first < 2:
            raise
    fewest, most = first + 1, len(body.messages) - 1  # the first message after the gap
    best = await _cut(asked, limits, body, first, most)
    while fewest < most:
        middle = (fewest + most) // 2
        try:
            best = await _cut(asked, limits, body, first, middle)
            most = middle
        except ApiError as error:
            if error.code != TOO_LONG:
                raise
            fewest = middle + 1
    return best


TOO_LONG = "context_length_exceeded"
_LEADING = ("system", "developer")


async def _cut(
    asked: ResolvedRequest, limits: Limits, body: ChatRequest, first: int, start: int
) -> tuple[ChatRequest, ChatPrompt]:
    messages = [*body.messages[:first], *_whole(body.messages[start:])]
    shorter = body.model_copy(update={"messages": messages})
    return shorter, await _prompt(asked, limits, shorter)


def _whole(messages: Sequence[Message]) -> Sequence[Message]:
    """Without tool results at the start whose calls were dropped."""
    start = next((i for i, one in enumerate(messages) if one.role != "tool"), len(messages) - 1)
    return messages[start:]


async def _prompt(asked: ResolvedRequest, limits: Limits, body: ChatRequest) -> ChatPrompt:
    prompt = await asked.prompts.chat(body)
    wanted = body.max_completion_tokens or body.max_tokens or 1
    most = limits.max_seq_len
    if len(prompt.ids) + wanted > most:
        reason = f"The prompt has {len(prompt.ids)} and {wanted} more are asked for"
        raise ApiError(400, TOO_LONG, f"{context_length(most)}. {reason}", "messages")
    return prompt
