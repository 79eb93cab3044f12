"""Request bodies of TGI's and LoRAX's API, and their conversion to completions."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from manylora.doors.http.api.errors import FORMAT, ApiError, invalid_value
from manylora.doors.http.api.parsing import validate
from manylora.doors.http.api.schema import MAX_TOKENS, Body, CompletionRequest, Items, Text, WordText
from manylora.request import MAX_MIXED, MAX_SCALE

BASE_MODEL = "__base_model__"  # LoRAX's name for no adapter
DEFAULT_TOKENS = 100
MAX_STOPS = 16
# This API's names for fields of completions.
NAMES = {
    "max_tokens": "parameters.max_new_tokens",
    "model": "parameters.adapter_id",
    "lora_path": "parameters.adapter_id",
    "lora": "parameters.merged_adapters",
    "logprobs": "parameters.top_n_tokens",
    "prompt_logprobs": "parameters.decoder_input_details",
    "n": "parameters.best_of",
    "best_of": "parameters.best_of",
    "stop": "parameters.stop",
    "temperature": "parameters.temperature",
    "prompt": "inputs",
    "seed": "parameters.seed",
    "guided_json": "parameters.grammar",
    "guided_regex": "parameters.grammar",
    FORMAT: "parameters.grammar",
}


class Grammar(Body):
    """type json: value is a JSON schema, as an object or a text. json_schema: value has it in `schema`."""

    type: Literal["json", "json_schema", "regex"]
    value: str | dict[str, Any]


class JsonFormat(Body):
    """LoRAX's response_format."""

    type: Literal["text", "json_object", "json_schema"]
    schema_: dict[str, Any] | str | None = Field(None, alias="schema")


class MergedAdapters(Body):
    """Adapters that act together, each with its weight. The last two have no effect on linear."""

    ids: Annotated[Items[Text], Field(min_length=1, max_length=MAX_MIXED)]
    weights: Annotated[
        Items[Annotated[float, Field(ge=-MAX_SCALE, le=MAX_SCALE)]], Field(min_length=1, max_length=MAX_MIXED)
    ]
    merge_strategy: Literal["linear"] = "linear"
    density: float | None = None
    majority_sign_method: Literal["total", "frequency"] | None = None


class TgiParameters(Body):
    """max_new_tokens: null: the rest of the context, as in LoRAX; missing: 100, as in TGI."""

    adapter_id: Annotated[str, Field(max_length=4096)] = ""
    adapter_source: Literal["hub", "local", "s3"] | None = None
    merged_adapters: MergedAdapters | None = None
    best_of: int = Field(1, ge=1, le=128)
    decoder_input_details: bool = False
    details: bool = False
    do_sample: bool = False
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    grammar: Grammar | None = None
    ignore_eos_token: bool = False
    max_new_tokens: int | None = Field(DEFAULT_TOKENS, ge=1, le=MAX_TOKENS)
    repetition_penalty: float | None = Field(None, ge=0.001, le=100)
    response_format: JsonFormat | None = None
    return_full_text: bool = False
    seed: int | None = Field(None, ge=0, le=2**64 - 1)
    stop: Items[WordText] = Field([], max_length=MAX_STOPS)
    stop_sequences: Items[WordText] = Field([], max_length=MAX_STOPS)
    temperature: float | None = Field(None, ge=0, le=100)
    top_k: int | None = Field(None, ge=1, le=MAX_TOKENS)
    top_n_tokens: int | None = Field(None, ge=0, le=20)
    top_p: float | None = Field(None, gt=0, le=1)
    truncate: int | None = Field(None, ge=1, le=MAX_TOKENS)
    typical_p: float | None = Field(None, gt=0, le=1)
    watermark: Literal[False] = False

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        found = super()._without_nulls(given)  # type: ignore[operator]
        is_null = isinstance(given, dict) and given.get("max_new_tokens", 0) is None
        return {**found, "max_new_tokens": None} if is_null else found

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn. Otherwise the most probable one is taken."""
        asked = (self.temperature, self.top_k, self.top_p, self.typical_p)
        return self.temperature != 0 and (self.do_sample or any(one is not None for one in asked))


class TgiRequest(Body):
    """stream has no effect on /generate_stream, which always streams."""

    inputs: str = Field(min_length=1)
    parameters: TgiParameters = TgiParameters.model_validate({})
    stream: bool = False


def adapter_fields(given: TgiParameters, base: str) -> dict[str, Any]:
    """The fields of a completion that name its adapters. Raises ApiError."""
    merged, where = given.merged_adapters, "parameters.merged_adapters"
    if merged is not None:
        if given.adapter_id:
            raise invalid_value(f"parameters.adapter_id and {where} exclude each other: give one", where)
        if len(merged.ids) != len(merged.weights):
            raise invalid_value(f"{where}: ids and weights must have the same length", where)
        members = zip(merged.ids, merged.weights, strict=True)
        return {"model": base, "lora": [{"name": name, "scale": scale} for name, scale in members]}
    if given.adapter_id in ("", BASE_MODEL):
        return {"model": base}
    if given.adapter_source == "local":  # a name, or a path that the operator allows
        return {"model": base, "lora_path": given.adapter_id}
    return {"model": given.adapter_id}


def completion_request(
    body: TgiRequest,
    adapters: dict[str, Any],
    ids: Sequence[int],
    room: int,
    end_ids: Sequence[int],
    stream: bool,
) -> CompletionRequest:
    """adapters: as from `adapter_fields`. ids: of the prompt. room: tokens that fit after it. end_ids: tokens
    that end an output. Raises ApiError.
    """
    given = body.parameters
    if given.best_of > 1 and (stream or not given.samples):
        reason = "parameters.best_of above 1 needs sampling (do_sample, or a temperature) and no stream"
        raise invalid_value(reason, "parameters.best_of")
    wanted = room if given.max_new_tokens is None else given.max_new_tokens
    if "max_new_tokens" not in given.model_fields_set:
        wanted = min(wanted, room)
    known = {
        name: getattr(given, name)
        for name in ("temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "frequency_penalty")
    }
    if not given.samples:
        known |= {"temperature": 0.0, "top_k": -1, "top_p": 1.0}
    stops = list(dict.fromkeys([*given.stop, *given.stop_sequences]))
    seed = secrets.randbits(63) if given.seed is None else given.seed
    top = given.top_n_tokens or 0
    completion = {
        **adapters,
        **{name: value for name, value in known.items() if value is not None},
        **_guide(given),
        **({"stop": stops} if stops else {}),
        "prompt": list(ids),
        "max_tokens": wanted,
        "seed": seed,
        "n": given.best_of,
        "best_of": given.best_of,
        # TGI shows what ended the output: the stop text, and the end token among the tokens.
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "stop_token_ids": [] if given.ignore_eos_token else list(end_ids),
        "logprobs": top if stream or given.details else 0 if given.best_of > 1 else None,
        "prompt_logprobs": 0 if given.decoder_input_details else None,
        "stream": stream,
    }
    return validate(completion, CompletionRequest)


def _guide(given: TgiParameters) -> dict[str, Any]:
    """The field of a completion for what binds the output. Raises ApiError."""
    wanted = given.response_format
    if given.grammar is not None:
        if wanted is not None:
            reason = "parameters.grammar and parameters.response_format both bind the answer: give one"
            raise invalid_value(reason, "parameters.response_format")
        kind, value = given.grammar.type, given.grammar.value
        if kind == "regex" and not isinstance(value, str):
            raise invalid_value("parameters.grammar.value must be a text", "parameters.grammar.value")
        if kind == "json_schema" and isinstance(value, dict) and isinstance(value.get("schema"), dict):
            value = value["schema"]
        return {"guided_regex" if kind == "regex" else "guided_json": value}
    if wanted is None or wanted.type == "text":
        return {}
    if wanted.type == "json_schema" and wanted.schema_ is None:
        field = "parameters.response_format.schema"
        raise ApiError(400, "missing_field", f"{field} is required", field)
    return {"guided_json": {"type": "object"} if wanted.schema_ is None else wanted.schema_}
