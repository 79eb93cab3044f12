"""PromptReader: converts what callers of an LLM pass as a prompt to token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from manylora.config.model import ModelConfig
from manylora.generation.sampling import SamplingParams
from manylora.generation.tokenizer import Tokenizer

Input = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or a mapping with `prompt` or `prompt_token_ids`.

For an encoder-decoder model the prompt is the encoder's. The mapping may have `decoder_input_token_ids`, with
which the decoder starts.
"""

DECODER_IDS = "decoder_input_token_ids"


@dataclass(frozen=True)
class Prompt:
    """text: None for a prompt of token ids. token_ids: as they are used.

    decoder_ids: the tokens with which the decoder of an encoder-decoder model starts; None: decoder only.
    """

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


class PromptReader:
    """max_seq_len: prompt and output, in tokens."""

    def __init__(self, model: ModelConfig, max_seq_len: int) -> None:
        self._model, self._max_seq_len = model, max_seq_len

    def read(self, inputs: Input | ChatText, params: SamplingParams, tokenizer: Tokenizer | None) -> Prompt:
        """tokenizer: None if prompts are token ids. Raises ValueError, RequestError."""
        if isinstance(inputs, Mapping):
            known = [name for name in ("prompt", "prompt_token_ids") if inputs.get(name) is not None]
            if len(known) != 1 or inputs.keys() - {"prompt", "prompt_token_ids", DECODER_IDS}:
                raise ValueError(
                    "a prompt must be a text, token ids, or a dict with one of these as "
                    "'prompt' or 'prompt_token_ids'"
                )
            prompt = self.read(inputs[known[0]], params, tokenizer)
            decoder_ids = inputs.get(DECODER_IDS)
            return prompt if decoder_ids is None else self._continue(prompt, decoder_ids)
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
            context = None if params.truncate_prompt_tokens else self._max_seq_len
            ids = tokenizer.encode(text, special, context)
        if params.truncate_prompt_tokens is not None:
            ids = ids[-params.truncate_prompt_tokens :]
        encoder = self._model.encoder
        return Prompt(text, tuple(ids), (encoder.decoder_start_id,) if encoder else None)

    def _continue(self, prompt: Prompt, decoder_ids: Any) -> Prompt:
        if self._model.encoder is None:
            raise ValueError(f"{DECODER_IDS} is for encoder-decoder models: leave it out")
        ids = [token for token in decoder_ids if isinstance(token, int)]
        if not ids or len(ids) < len(decoder_ids):
            raise ValueError(f"{DECODER_IDS} must be a list of token ids, got {decoder_ids!r:.80}")
        return replace(prompt, decoder_ids=tuple(ids))


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
