"""Parses and validates request bodies, names other servers' fields, and turns pydantic's errors into ours."""

from __future__ import annotations

import re
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from manylora.doors.http.api.errors import ApiError, invalid_value, unsupported_field
from manylora.doors.http.api.schema import Body
from manylora.errors import printable

# A union's branch in the path of an error.
BRANCH = re.compile(
    r".*\[|(str|constrained-str|TextPart|NamedToolChoice|AllowedToolChoice|tool_use|tool_result)$|function-",
    re.DOTALL,
)
BOUNDS = (  # pydantic errors about values of the right type
    "too_long",
    "too_short",
    "string_too_long",
    "string_too_short",
    "greater_than_equal",
    "less_than_equal",
    "union_tag_invalid",
)
# Limits of a body; commas, colons and opening brackets count outside of strings.
MAX_COMMAS, MAX_ENTRIES, MAX_BRACKETS, MAX_STRINGS = 2**20, 2**16, 2**14, 2**18
NOT_COUNTED = bytes(set(range(256)) - set(b'",:[{'))

BodyT = TypeVar("BodyT", bound=Body)


def parse(raw: bytes | bytearray, kind: type[BodyT]) -> BodyT:
    """Parse and validate a body. Raises ApiError with the name of the wrong field."""
    return validate(read_object(raw), kind)


def read_object(raw: bytes | bytearray) -> dict[str, Any]:
    """Raises ApiError."""
    check_size(raw)
    try:
        value = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        reason = str(error)[:200]
        raise ApiError(400, "invalid_json", f"The body is not valid JSON: {reason}") from error
    if not isinstance(value, dict):
        raise ApiError(400, "invalid_json", "The body must be a JSON object")
    return value


def validate(value: dict[str, Any], kind: type[BodyT]) -> BodyT:
    """Raises ApiError with the name of the wrong field."""
    given = {name: item for name, item in value.items() if item is not None}
    foreign = given.keys() - kind.model_fields.keys()
    for name in [name for name in given if name in foreign and name not in IGNORED_FIELDS]:
        raise _not_supported(name)
    for name in [name for name in given if name in foreign]:
        if given.pop(name) not in IGNORED_FIELDS[name]:
            raise _not_supported(name)
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise api_error(error) from error


def check_size(raw: bytes | bytearray) -> None:
    """Raises ApiError 413 for too many JSON values, before any is made: each takes a hundred times the time
    and memory of its text.
    """
    if len(raw) <= MAX_BRACKETS:
        return
    bare = raw.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, NOT_COUNTED)
    if bare.count(b'"') <= 2 * MAX_STRINGS:
        values = b"".join(bare.split(b'"')[::2])
        commas, entries = values.count(b","), values.count(b":")
        if commas <= MAX_COMMAS and entries <= MAX_ENTRIES and len(values) - commas - entries <= MAX_BRACKETS:
            return
    most = f"{MAX_COMMAS} commas, {MAX_ENTRIES} fields, {MAX_BRACKETS} lists and objects, {MAX_STRINGS} texts"
    raise ApiError(413, "request_too_large", f"The body has too many parts: at most {most} are taken")


def _not_supported(name: str) -> ApiError:
    instead = INSTEAD.get(name.rpartition(".")[2], "leave it out")  # the field may be in a part of the body
    return unsupported_field(f"{printable(name[:200])} is not supported: {instead}", name[:200])


def api_error(error: ValidationError, where: str = "") -> ApiError:
    """The first error, unknown fields before others. where: path of the validated value in the body."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    first = found[0]
    if first["loc"] and first["type"].endswith("_type"):  # of a union, the branch whose type fits
        fits = (one for one in found if one["type"] in BOUNDS and one["loc"][0] == first["loc"][0])
        first = next(fits, first)
    first = next((one for one in found if one["type"] == "extra_forbidden"), first)
    if first["loc"] and first["loc"][-1] not in INSTEAD:  # a part of another type has other fields
        types = (one for one in found if one["type"] == "literal_error" and one["loc"][-1] == "type")
        first = next((one for one in types if one["loc"][:-1] == first["loc"][:-1]), first)
    # Names of union branches in the path are not part of the body.
    path = [str(part) for part in first["loc"] if not (isinstance(part, str) and BRANCH.match(part))]
    name = ".".join([where, *path] if where else path)[:200]
    if first["type"] == "extra_forbidden":
        return _not_supported(name)
    if first["type"] == "missing":
        return ApiError(400, "missing_field", f"{name} is required", name)
    return invalid_value(f"{name}: {first['msg'][:300]}", name)


# Without effect, with the values that are accepted. Empty: any value.
IGNORED_FIELDS: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "detokenize": (True,),
    "early_stopping": (False,),
    "frequency_penalty_decay": (),
    "function_call": ("none",),
    "functions": ([],),
    "length_penalty": (1.0,),
    "modalities": (["text"],),
    "n_best": (),
    "return_context_logits": (False,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "top_p_min": (0,),
    "use_beam_search": (False,),
}
INSTEAD = {
    **dict.fromkeys(
        ("adapter", "adapter_name", "lora_adapter", "lora_id", "lora_name", "lora_task_id"),
        "name the adapter in model, lora_model or lora_request",
    ),
    **dict.fromkeys(
        ("beam_width", "early_stopping", "length_penalty", "use_beam_search"),
        "beam search is available in Python (LLM) and from Triton (beam_width)",
    ),
    **dict.fromkeys(
        ("guided_decoding", "guided_decoding_guide", "guided_decoding_guide_type"),
        "use structured_outputs or response_format",
    ),
    **dict.fromkeys(("max_length", "max_new_tokens", "n_predict", "num_predict"), "use max_tokens"),
    **dict.fromkeys(("inputs", "text_input"), "use prompt"),
    **dict.fromkeys(
        ("file", "image", "image_url", "input_audio", "mm_processor_kwargs", "video_url"),
        "only text is served",
    ),
    **dict.fromkeys(
        ("disaggregated_params", "kv_transfer_params"),
        "this server does both prefill and decode: leave it out",
    ),
    "extra_body": "put what it holds beside the other fields, as the openai package does",
    **dict.fromkeys(("parameters", "sampling_params"), "put what it holds beside the other fields"),
    "api_token": "the operator's HF_TOKEN is used, at the start of the server",
    "chat_template": "the operator sets it (--chat-template); chat_template_kwargs are its variables",
    "documents": "put them into messages, or into chat_template_kwargs if the template reads them",
    "enable_thinking": "put it into chat_template_kwargs",
    "end_id": "use stop_token_ids",
    "input": "it is a field of /v1/responses and /v1/embeddings",
    "logits_processors": "use logit_bias, allowed_token_ids, bad_words or a guide",
    "lora_local_path": "use lora_path",
    "messages": "it is a field of /v1/chat/completions",
    "no_repeat_ngram_size": "use repetition_penalty or frequency_penalty",
    "prompt": "it is a field of /v1/completions",
    "random_seed": "use seed",
    "return_tokens_as_token_ids": "use return_token_ids",
    "stop_words": "use stop",
    "streaming": "use stream",
}
"""What to do instead, by the name of a field that is not accepted."""
