"""Parts of request bodies: types and groups of fields that several bodies share."""

from __future__ import annotations

import json
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from manylora.generation.sampling import parameters_of

Item = TypeVar("Item")
# fail_fast: otherwise a union collects the errors of all branches, 2 KiB per wrong item.
Items = Annotated[list[Item], Field(fail_fast=True)]
Text = Annotated[str, Field(max_length=512)]
Grammar = Annotated[str, Field(min_length=1, max_length=65536)]
WordText = Annotated[str, Field(min_length=1, max_length=1024)]
RequestId = Annotated[str, Field(pattern="^[!-~]{1,128}$")]  # printable ASCII: safe in a header and a log
MAX_VARIABLES = 2**16  # characters of chat_template_kwargs, as JSON
TEMPLATE_OWN = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template")


def at_most(count: int, what: str) -> BeforeValidator:
    """Check the size before anything else: pydantic collects an error for every wrong value of a dict."""

    def check(given: Any) -> Any:
        if isinstance(given, dict) and len(given) > count:
            raise ValueError(f"at most {count} {what}")
        return given

    return BeforeValidator(check)


def _check_variables(given: Any) -> Any:
    if not isinstance(given, dict):
        return given
    own = next((name for name in TEMPLATE_OWN if name in given), None)
    if own is not None:
        raise ValueError(f"{own} is no variable of its own: leave it out")
    if len(json.dumps(given)) > MAX_VARIABLES:
        raise ValueError(f"it may have {MAX_VARIABLES} characters as JSON")
    return given


class Body(BaseModel):
    """An unknown field is an error; a null counts as a field left out."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        found = {name: value for name, value in given.items() if value is not None}
        if len(found) > len(cls.model_fields):  # pydantic collects an error for every unknown field
            unknown = next(name for name in found if name not in cls._names())
            found = {unknown: None} | {name: one for name, one in found.items() if name in cls._names()}
        return found

    @classmethod
    @cache
    def _names(cls) -> frozenset[str]:
        """Of the fields, as a body gives them."""
        return frozenset(field.alias or name for name, field in cls.model_fields.items())


def sampling_fields(entry_point: str) -> dict[str, Any]:
    """Fields for `pydantic.create_model`: the sampling parameters of http, ollama or anthropic."""
    found = {}
    for one in parameters_of(entry_point):
        name, default, most = one.name, one.default, one.most
        if entry_point == "ollama":
            name, default = one.option, one.default if one.option_default is None else one.option_default
        elif entry_point == "anthropic" and one.anthropic_most is not None:
            most = one.anthropic_most
        kind = one.kind if default is not None else one.kind | None
        found[name] = (kind, default if one.kind is bool else Field(default, ge=one.least, le=most))
    return found


class StructuredOutputs(Body):
    """As in vLLM: exactly one of the first five. grammar: EBNF if it contains `::=`, otherwise Lark."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: Grammar | None = None
    choice: Annotated[Items[WordText], Field(min_length=1, max_length=1024)] | None = None
    grammar: Grammar | None = None
    json_object: bool | None = None
    whitespace_pattern: Text | None = None  # allowed between JSON tokens
    disable_any_whitespace: bool = True
    disable_fallback: bool = True  # no effect: there is only one backend


class GuideFields(Body):
    """Constraints on the output, under the names of vLLM and of SGLang (the last three)."""

    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: Grammar | None = None
    guided_choice: Annotated[Items[WordText], Field(min_length=1, max_length=1024)] | None = None
    guided_grammar: Grammar | None = None
    guided_whitespace_pattern: Text | None = None
    guided_decoding_backend: Text | None = None  # no effect: there is only one backend
    regex: Grammar | None = None
    ebnf: Grammar | None = None
    json_schema: str | dict[str, Any] | None = None


class NeutralFields(Body):
    """Fields of OpenAI that cannot change an answer here. They are validated and have no effect."""

    metadata: Annotated[
        dict[Annotated[str, Field(max_length=64)], Text],
        Field(max_length=16),
        at_most(16, "pairs are taken"),
    ] = {}
    store: bool = False
    prompt_cache_key: Text | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    safety_identifier: Text | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    user: Text | None = None


class TemplateFields(Body):
    """How messages become a prompt.

    chat_template_kwargs: variables for the chat template. continue_final_message: the prompt ends inside the
    last message, and the output continues it. add_generation_prompt: false: do not start an assistant turn.
    """

    chat_template_kwargs: Annotated[
        dict[str, Any], Field(max_length=64), at_most(64, "are taken"), BeforeValidator(_check_variables)
    ] = {}
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None
