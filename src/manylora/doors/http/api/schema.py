"""Request bodies as pydantic models. An unknown field is an error; a null counts as a field left out."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator

from manylora.generation.sampling import parameters_of
from manylora.request import MAX_MIXED, MAX_SCALE

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
    """As in vLLM: exactly one of the first six. grammar: EBNF if it contains `::=`, otherwise Lark."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: Grammar | None = None
    choice: Annotated[Items[WordText], Field(min_length=1, max_length=1024)] | None = None
    grammar: Grammar | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
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
    """continue_final_message: the prompt ends inside the last message. add_generation_prompt: false: do not
    start an assistant turn.
    """

    chat_template_kwargs: Annotated[
        dict[str, Any], Field(max_length=64), at_most(64, "are taken"), BeforeValidator(_check_variables)
    ] = {}
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None


MAX_TOKENS = 2**31 - 1
MAX_INPUTS = 2048  # for embeddings, as OpenAI's
MAX_BIAS, LARGEST_BIAS = 2**15, 100
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKENS)]


def _first_wrong_bias(given: Any) -> Any:
    """pydantic would collect an error for every wrong value."""
    for token, bias in given.items() if isinstance(given, dict) else ():
        if type(bias) not in (int, float) or abs(bias) > LARGEST_BIAS:
            return {token: bias}
    return given


class LoraRequest(Body):
    """As in TensorRT-LLM's servers. lora_int_id has no effect: adapters are identified by content."""

    lora_name: Text | None = None
    lora_int_id: int | None = Field(None, ge=0, le=2**64 - 1)
    lora_path: str | None = Field(None, min_length=1, max_length=4096)
    lora_ckpt_source: Literal["hf", "nemo"] | None = None


class LoraMember(Body):
    """One of several adapters that act together, and its scale."""

    name: Text
    scale: float = Field(1.0, ge=-MAX_SCALE, le=MAX_SCALE)


class ResponseFormat(Body):
    """json_schema needs json_schema.schema; regex, ebnf and lark_grammar a field of the same name; llguidance
    its JSON form in grammar; structural_tag format, or structures and triggers. llama.cpp's json_object may
    have a schema, TGI's json, json_object and regex have a value.
    """

    type: Literal[
        "text", "json_object", "json_schema", "regex", "ebnf", "lark_grammar", "llguidance", "structural_tag"
    ]
    json_schema: dict[str, Any] | None = None
    regex: Grammar | None = None
    ebnf: Grammar | None = None
    lark_grammar: Grammar | None = None
    grammar: str | dict[str, Any] | None = None
    format: dict[str, Any] | None = None
    structures: Items[dict[str, Any]] | None = Field(None, max_length=1024)
    triggers: Items[str] | None = Field(None, max_length=1024)

    @model_validator(mode="before")
    @classmethod
    def _of_llama_cpp_and_tgi(cls, given: Any) -> Any:
        kind = given.get("type") if isinstance(given, dict) else None
        found = [] if kind is None else [name for name in ("schema", "value") if given.get(name) is not None]
        if len(found) != 1 or kind not in ("json", "json_object", "regex") or given.get(kind) is not None:
            return given
        rest, value = {name: one for name, one in given.items() if name != found[0]}, given[found[0]]
        if kind == "regex":
            return rest | {"regex": value}
        return rest | {"type": "json_schema", "json_schema": {"schema": value}}

    @property
    def schema_given(self) -> dict[str, Any] | None:
        """The schema of type json_schema."""
        schema = (self.json_schema or {}).get("schema") if self.type == "json_schema" else None
        return schema if isinstance(schema, dict) else None


class StreamOptions(Body):
    """continuous_usage_stats, as in vLLM: every chunk has the usage so far."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False


class AdapterFields(Body):
    """The fields that can name a request's adapters."""

    model: str = Field("", max_length=512)
    lora_model: Text | None = None
    load_lora_weights: Literal["auto", "always", "never"] = "auto"
    lora_request: LoraRequest | None = None
    lora_path: str | None = Field(None, min_length=1, max_length=4096)
    adapter_id: Text | None = None
    lora: Annotated[Items[LoraMember], Field(max_length=MAX_MIXED)] | None = None


if TYPE_CHECKING:

    class SamplingFields(Body):
        """Those of them that are read by name."""

        temperature: float
        top_p: float
        top_k: int
        min_tokens: int
        seed: int | None
else:
    SamplingFields = create_model("SamplingFields", __base__=Body, **sampling_fields("http"))


class GenerationRequest(SamplingFields, AdapterFields, GuideFields, NeutralFields):
    """Fields of completions and chats. max_tokens: None is the API's default."""

    max_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS)
    n: int = Field(1, ge=1, le=128)
    stop: WordText | Annotated[Items[WordText], Field(max_length=16)] = Field([])
    stop_token_ids: Items[TokenId] = Field([], max_length=64)
    logit_bias: Annotated[
        dict[str, Annotated[float, Field(ge=-LARGEST_BIAS, le=LARGEST_BIAS)]],
        BeforeValidator(_first_wrong_bias),
        at_most(MAX_BIAS, "tokens may have a bias"),  # the last one is called first
    ] = Field({})
    allowed_token_ids: Annotated[Items[TokenId], Field(min_length=1, max_length=2**18)] | None = None
    bad_words: Items[WordText] = Field([], max_length=256)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    response_format: ResponseFormat | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    return_token_ids: bool = False
    request_id: RequestId | None = None  # the response's id contains it
    cache_salt: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    priority: int = Field(0, ge=-(2**31), le=2**31 - 1)  # lower is earlier
    lora_version: Literal["keep", "follow"] = "keep"  # follow: switch to newer adapter versions while running


class CompletionRequest(GenerationRequest):
    """prompt: a text, token ids, or a list of either. logprobs: number of alternatives per token."""

    prompt: str | Items[TokenId] | Items[str] | Items[Items[TokenId]]
    best_of: int | None = Field(None, ge=1, le=128)
    echo: bool = False
    add_special_tokens: bool = True
    logprobs: int | None = Field(None, ge=0, le=20)


class TextPart(Body):
    type: Literal["text"]
    text: str


class _CalledFunction(Body):
    """arguments: a JSON object, as text."""

    name: str = Field(min_length=1, max_length=128)
    arguments: str


class ToolCall(Body):
    id: Text
    type: Literal["function"] = "function"
    function: _CalledFunction


class Message(Body):
    """content is optional in an assistant's message with tool_calls."""

    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: str | Items[TextPart] | None = None
    name: Text | None = None
    tool_calls: Items[ToolCall] = Field([], max_length=128)
    tool_call_id: Text | None = None
    reasoning_content: str | None = None  # of an earlier answer, for templates that show it
    reasoning: str | None = None  # vLLM's newer name

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and not (self.tool_calls or self.thought):
            raise ValueError("content is required")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls belong to the assistant's messages")
        return self

    @property
    def thought(self) -> str:
        return self.reasoning_content or self.reasoning or ""

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""


class _Function(Body):
    """parameters: a JSON schema of an object. strict: arguments must match it."""

    name: str = Field(pattern="^[A-Za-z0-9_.-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: _Function


class _ToolName(Body):
    name: str = Field(max_length=128)


class NamedToolChoice(Body):
    type: Literal["function"]
    function: _ToolName


class AllowedTool(Body):
    type: Literal["function"]
    function: _ToolName


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: Items[AllowedTool] = Field(min_length=1, max_length=128)


class AllowedToolChoice(Body):
    """A subset of the tools. The others are not shown to the model."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _named_tool(given: Any) -> Any:
    """TGI's form is the name alone."""
    is_name = isinstance(given, str) and given not in ("none", "auto", "required")
    return {"type": "function", "function": {"name": given}} if is_name else given


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolChoice, BeforeValidator(_named_tool)
]


class Prediction(Body):
    type: Literal["content"]
    content: str | Items[TextPart]


class ChatRequest(TemplateFields, GenerationRequest):
    """reasoning_effort: a variable for the chat template. verbosity and prediction have no effect.
    include_reasoning: false: leave reasoning out of the answer. separate_reasoning: SGLang's; false: leave it
    in the content.
    """

    messages: Items[Message] = Field(min_length=1, max_length=4096)
    tools: Items[Tool] = Field([], max_length=128)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True  # false: at most one call in an output
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    return_expanded_prompt: bool = False  # llgtrt: return the rendered chat template
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    include_reasoning: bool = True
    separate_reasoning: bool = True
    verbosity: Literal["low", "medium", "high"] | None = None
    prediction: Prediction | None = None
    # llgtrt: whether the chat template gets tools, and the schema of response_format as json_schema
    include_json_schema_in_prompt: bool = True


def thinking_variables(on: bool) -> dict[str, bool]:
    """For chat templates, which call it one or the other."""
    return {"enable_thinking": on, "thinking": on}


class TokenizeRequest(TemplateFields):
    """Exactly one of prompt and messages. tools: as in a chat."""

    model: str = Field("", max_length=512)
    prompt: str | None = None
    messages: Items[Message] | None = Field(None, min_length=1, max_length=4096)
    tools: Items[Tool] = Field([], max_length=128)
    add_special_tokens: bool = True


class DetokenizeRequest(Body):
    model: str = Field("", max_length=512)
    tokens: Items[TokenId]


class LoadTerms(Body):
    """Terms of a loaded adapter. owner: name of an API key; None: that of the caller."""

    load_inplace: bool = False
    pinned: bool = False
    idle_ttl_seconds: float | None = Field(None, gt=0, le=1e9)
    owner: Text | None = None
    public: bool = False


class LoadRequest(LoadTerms):
    """Exactly one of lora_path and alias_of."""

    lora_name: Text
    lora_path: str | None = Field(None, min_length=1, max_length=4096)
    alias_of: Text | None = None


class PinRequest(Body):
    lora_name: Text
    pinned: bool = True


class UnloadRequest(Body):
    lora_name: Text
    lora_int_id: int | None = None


MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


class BatchRequest(Body):
    """Body of POST /v1/batches."""

    input_file_id: str = Field(max_length=64)
    endpoint: str = Field(max_length=64)
    completion_window: Literal["24h"]
    metadata: dict[MetadataKey, MetadataValue] | None = Field(None, max_length=16)
