"""GenerationDefaults: what a generation_config.json gives to requests that leave it out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from manylora.openai.api.errors import ApiError
from manylora.openai.api.schema import CompletionRequest, GenerationRequest, validate

BodyT = TypeVar("BodyT", bound=GenerationRequest)
MAX_END_IDS = 64
# Fields of a request, by transformers' names and by their own.
FIELDS = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    **{name: name for name in ("presence_penalty", "frequency_penalty", "stop", "stop_token_ids")},
    "stop_strings": "stop",
    "min_new_tokens": "min_tokens",
    "min_tokens": "min_tokens",
    "max_new_tokens": "max_tokens",
    "max_tokens": "max_tokens",
}
# About beams, files, speed or what is returned; max_length is what max_new_tokens replaced.
NEUTRAL = {
    "transformers_version", "bos_token_id", "pad_token_id", "decoder_start_token_id", "max_length",
    "min_length", "length_penalty", "early_stopping", "use_cache", "cache_implementation", "cache_config",
    "return_legacy_cache", "return_dict_in_generate", "renormalize_logits", "remove_invalid_values",
    "compile_config", "disable_compile", "low_memory", "prefill_chunk_size", "trust_remote_code",
    "prompt_lookup_num_tokens", "max_matching_ngram_size", "is_assistant", "target_lookbehind",
    "generation_kwargs", "auto_map", "chat_format", "max_window_size",
}  # fmt: skip
NEUTRAL_PREFIXES = ("_", "output_", "assistant_", "num_assistant_")
OFF: tuple[Any, ...] = (None, False, 0, "", [], {})  # values that ask for nothing
OFF_AT_ONE = {
    "num_beams", "num_beam_groups", "num_return_sequences", "typical_p", "guidance_scale",
    "encoder_repetition_penalty",
}  # fmt: skip


@dataclass(frozen=True)
class GenerationDefaults:
    """fields: of a request's body. max_tokens: new ones; None: the API's. end_ids: tokens that end an output,
    in place of the model's; None: the model's."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    end_ids: tuple[int, ...] | None = None

    @classmethod
    def parse(cls, given: Any, vocab_size: int) -> GenerationDefaults:
        """given: the content of the file. Raises ValueError, with what is wrong."""
        if not isinstance(given, dict):
            raise ValueError("it must be a JSON object")
        found = {FIELDS[name]: value for name, value in given.items() if name in FIELDS and value is not None}
        for name, value in given.items():
            if not (name in FIELDS or name in ("eos_token_id", "do_sample") or _is_neutral(name, value)):
                raise ValueError(f"{name[:60]} is not supported")
        if given.get("do_sample") is False:
            found["temperature"] = 0.0
        try:
            validate({"prompt": "", **found}, CompletionRequest)
        except ApiError as error:
            raise ValueError(error.message) from error
        ids = [*found.get("stop_token_ids", ()), *(end_ids := _end_ids(given.get("eos_token_id")))]
        if max(ids, default=0) >= vocab_size:
            raise ValueError(f"{max(ids)} is no token of the model, which has {vocab_size}")
        max_tokens = found.pop("max_tokens", None)
        if max_tokens == 0:
            raise ValueError("max_new_tokens must be at least 1")
        return cls(found, max_tokens, end_ids or None)

    def apply_to(self, body: BodyT) -> BodyT:
        """The same body, with these in place of what it does not say."""
        more = {name: value for name, value in self.fields.items() if name not in body.model_fields_set}
        return body.model_copy(update=more) if more else body


NO_DEFAULTS = GenerationDefaults()


def _is_neutral(name: str, value: Any) -> bool:
    if name in NEUTRAL or name.startswith(NEUTRAL_PREFIXES):
        return True
    return any(value == one for one in OFF) or (name in OFF_AT_ONE and value == 1)


def _end_ids(given: Any) -> tuple[int, ...]:
    """Raises ValueError."""
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if len(ids) > MAX_END_IDS or not all(type(one) is int and 0 <= one < 2**31 for one in ids):
        raise ValueError(f"eos_token_id must be a token id, or at most {MAX_END_IDS} in a list")
    return tuple(dict.fromkeys(ids))
