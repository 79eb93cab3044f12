"""What callers of an LLM pass as prompts and messages, as token ids and as templates take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from manylora.config.model import EncoderConfig
from manylora.generation.chat_template import ROLES, call_arguments
from manylora.generation.sampling import SamplingParams
from manylora.generation.tokenizer import Tokenizer

Input = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or a mapping with `prompt` or `prompt_token_ids`.

For an encoder-decoder model the prompt is the encoder's. The mapping may have `decoder_input_token_ids`, with
which the decoder starts.
"""

DECODER_IDS = "decoder_input_token_ids"
SET_HERE = ("messages", "tools", "add_generation_prompt", "continue_final_message")  # template variables


@dataclass(frozen=True)
class Prompt:
    """text: None for token ids. decoder_ids: with which an encoder-decoder model's decoder starts."""

    text: str | None
    token_ids: tuple[int, ...]
    decoder_ids: tuple[int, ...] | None = None

    @property
    def length(self) -> int:
        """Number of tokens before the first new one."""
        return len(self.token_ids if self.decoder_ids is None else self.decoder_ids)


@dataclass(frozen=True)
class ChatText:
    """A rendered chat template: a prompt that already contains its special tokens."""

    text: str


def read_prompt(
    inputs: Input | ChatText,
    params: SamplingParams,
    tokenizer: Tokenizer | None,
    encoder: EncoderConfig | None,
    max_seq_len: int,
) -> Prompt:
    """max_seq_len: prompt and output, in tokens. Raises ValueError, RequestError."""
    if isinstance(inputs, Mapping):
        known = [name for name in ("prompt", "prompt_token_ids") if inputs.get(name) is not None]
        if len(known) != 1 or inputs.keys() - {"prompt", "prompt_token_ids", DECODER_IDS}:
            raise ValueError(
                "a prompt must be a text, token ids, or a dict with one of these as "
                "'prompt' or 'prompt_token_ids'"
            )
        prompt = read_prompt(inputs[known[0]], params, tokenizer, encoder, max_seq_len)
        given = inputs.get(DECODER_IDS)
        if given is None:
            return prompt
        if encoder is None:
            raise ValueError(f"{DECODER_IDS} is for encoder-decoder models: leave it out")
        ids = [token for token in given if isinstance(token, int)]
        if not ids or len(ids) < len(given):
            raise ValueError(f"{DECODER_IDS} must be a list of token ids, got {given!r:.80}")
        return replace(prompt, decoder_ids=tuple(ids))
    special = params.add_special_tokens
    if isinstance(inputs, ChatText):
        inputs, special = inputs.text, False
    text = inputs if isinstance(inputs, str) else None
    if text is None:
        ids = [token for token in inputs if isinstance(token, int)]
        if len(ids) < len(inputs):
            raise ValueError(f"a prompt must be a text or a list of token ids, got {inputs!r:.80}")
    elif tokenizer is None:
        raise ValueError("this LLM has no tokenizer (skip_tokenizer_init): prompts must be token ids")
    else:
        ids = tokenizer.encode(text, special, None if params.truncate_prompt_tokens else max_seq_len)
    if params.truncate_prompt_tokens is not None:
        ids = ids[-params.truncate_prompt_tokens :]
    return Prompt(text, tuple(ids), (encoder.decoder_start_id,) if encoder else None)


def as_prompts(inputs: Any) -> tuple[list[Any], bool]:
    """The prompts that a call was given, and whether it was a single one."""
    single = isinstance(inputs, str | Mapping) or (bool(inputs) and isinstance(inputs[0], int))
    return ([inputs] if single else list(inputs)), single


def for_each(prompts: Sequence[Any], name: str, value: Any, is_one: bool = False) -> list[Any]:
    """Returns one value per prompt for an argument that is either one value for all prompts, or a list or
    tuple with one for each. is_one: it is one value, whatever its type. Raises ValueError."""
    if is_one or not isinstance(value, list | tuple):
        return [value] * len(prompts)
    if len(value) != len(prompts):
        raise ValueError(f"{name} must be one, or one for each prompt: got {len(value)} for {len(prompts)}")
    return list(value)


def chat_variables(given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """chat_template_kwargs. Raises ValueError."""
    own = sorted(set(given or ()) & set(SET_HERE))
    if own:
        raise ValueError(f"chat_template_kwargs must not have {', '.join(own)}")
    return given or {}


def shown_message(message: Any) -> dict[str, Any]:
    """A message in the form that templates expect. Raises ValueError."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"messages: each must be a dict with a role, got {str(message)[:80]!r}")
    content = message.get("content")
    if isinstance(content, list):
        parts = [one for one in content if isinstance(one, Mapping) and one.get("type") == "text"]
        texts = [one["text"] for one in parts if isinstance(one.get("text"), str)]
        if len(texts) < len(content):
            raise ValueError("messages: content must be a text, or parts of type text")
        content = "\n".join(texts)
    elif not (content is None or isinstance(content, str)):
        raise ValueError(f"messages: content must be a text, got {str(content)[:80]!r}")
    shown = {**message, "role": ROLES.get(message["role"], message["role"]), "content": content or ""}
    if message.get("tool_calls"):
        try:
            shown["tool_calls"] = [_shown_call(call, call["function"]) for call in message["tool_calls"]]
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ValueError(
                'messages: tool_calls must be like [{"id": "1", "type": "function", "function": '
                '{"name": "f", "arguments": "{}"}}], whose arguments are a JSON object'
            ) from error
    return shown


def _shown_call(call: Mapping[str, Any], function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call_arguments(function.get("arguments"))
    return {**call, "function": {"name": function["name"], "arguments": arguments}}
