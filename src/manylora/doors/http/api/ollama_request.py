"""Request bodies of Ollama's API, and their conversion to chats and completions."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, create_model

from manylora.doors.http.api import schema
from manylora.doors.http.api.errors import FORMAT, invalid_value, unsupported_field
from manylora.doors.http.api.parsing import BodyT, validate
from manylora.doors.http.api.schema import MAX_INPUTS, MAX_TOKENS, Body, Items, Text, WordText
from manylora.generation.sampling import parameters_of

NAMES = {FORMAT: "format"}  # this API's names for fields of chats and completions
Number = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]


# Options for starting Ollama's runner, without effect.
RUNNER = {
    **dict.fromkeys(
        ("num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread"), (Number | None, None)
    ),
    **dict.fromkeys(
        ("numa", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap", "use_mlock"),
        (bool | None, None),
    ),
}

if TYPE_CHECKING:

    class OllamaSampling(Body):
        repeat_penalty: float
else:
    SAMPLING = schema.sampling_fields("ollama")
    OllamaSampling = create_model("OllamaSampling", __base__=Body, **SAMPLING, **RUNNER)


class Options(OllamaSampling):
    """As in a Modelfile, with Ollama's defaults.

    num_predict: 0 or less: until the end of the answer or of the context. repeat_penalty applies to the whole
    output, so repeat_last_n cannot be changed.
    """

    num_predict: int = Field(-1, ge=-2, le=MAX_TOKENS)
    seed: int = Field(-1, ge=-(2**63), le=2**63 - 1)  # -1: a new one for each answer
    stop: WordText | Annotated[Items[WordText], Field(max_length=16)] = Field([])
    repeat_last_n: int | None = Field(None, ge=-1, le=MAX_TOKENS)
    mirostat: Literal[0] = 0
    mirostat_tau: float | None = None  # mirostat parameters
    mirostat_eta: float | None = None
    tfs_z: float = Field(1.0, ge=1, le=1)
    penalize_newline: Literal[True] = True


class _Generation(Body):
    """format: "json", or a JSON schema. truncate: drop the oldest messages of a chat that is too long.
    keep_alive has no effect.
    """

    model: str = Field(min_length=1, max_length=512)
    stream: bool = True
    format: Literal["", "json"] | dict[str, Any] = ""
    options: Options = Options.model_validate({})
    keep_alive: float | Text | None = None
    think: bool | Literal["low", "medium", "high"] = False
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    truncate: bool = True
    shift: Literal[False] = False  # the context window is not shifted when it is full


class _OllamaFunction(Body):
    index: int | None = None
    name: str
    arguments: dict[str, Any]


class _Call(Body):
    id: Text = ""
    type: Literal["function"] = "function"
    function: _OllamaFunction


class _Message(Body):
    """tool_name: the tool that produced this result."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    images: Items[str] = Field([])
    tool_calls: Items[_Call] = Field([], max_length=128)
    tool_name: Text | None = None
    name: Text | None = None  # older name of tool_name
    tool_call_id: Text | None = None


class OllamaChat(_Generation):
    messages: Items[_Message] = Field([], max_length=4096)
    tools: Items[schema.Tool] = Field([], max_length=128)


class OllamaGenerate(_Generation):
    """raw: use the prompt as it is, without the chat template. context: returned by older servers."""

    prompt: str = ""
    system: str = ""
    raw: bool = False
    images: Items[str] = Field([])
    suffix: Literal[""] = ""
    template: Literal[""] = ""
    context: Items[Number] = Field([])


class _Embedded(Body):
    """keep_alive and options have no effect."""

    model: str = Field(min_length=1, max_length=512)
    options: Options = Options.model_validate({})
    keep_alive: float | Text | None = None


class OllamaEmbed(_Embedded):
    """input: one or several texts. truncate: use only the start of a text that is too long."""

    input: str | Annotated[Items[str], Field(max_length=MAX_INPUTS)] = Field([])
    truncate: bool = True
    dimensions: int | None = Field(None, ge=1, le=MAX_TOKENS)

    @property
    def texts(self) -> list[str]:
        return list(self.input) if isinstance(self.input, list) else [self.input] * bool(self.input)


class OllamaEmbeddings(_Embedded):
    """The older endpoint. prompt: one text, truncated as in OllamaEmbed."""

    prompt: str = ""


class OllamaShow(Body):
    """name: older name of model."""

    model: str = Field("", max_length=512)
    name: str = Field("", max_length=512)
    verbose: bool = False
    system: str = ""
    template: str = ""
    options: dict[str, Any] = Field({})


def chat_request(body: OllamaChat | OllamaGenerate, model: str) -> schema.ChatRequest:
    """model: the name of the served model that the request means. Raises ApiError."""
    _check(body)
    if isinstance(body, OllamaChat):
        messages = _messages(body)
    else:
        system = [{"role": "system", "content": body.system}] if body.system else []
        messages = [*system, {"role": "user", "content": body.prompt}]
    chat = {"messages": messages, **_sampling(body, model)}
    chat |= {"logprobs": body.logprobs, "top_logprobs": body.top_logprobs}
    if "think" in body.model_fields_set:
        chat["chat_template_kwargs"] = schema.thinking_variables(bool(body.think))
        chat["reasoning_effort"] = body.think if isinstance(body.think, str) else None
    if isinstance(body, OllamaChat) and body.tools:
        chat["tools"] = [tool.model_dump(exclude_none=True) for tool in body.tools]
    return _as_given(validate(chat, schema.ChatRequest), body.options)


def completion_request(body: OllamaGenerate, model: str) -> schema.CompletionRequest:
    """The completion for a raw prompt. Raises ApiError."""
    _check(body)
    check_thinking(body, False)
    if body.system:
        raise invalid_value("system needs raw false", "system")
    completion = {"prompt": body.prompt, **_sampling(body, model)}
    completion["logprobs"] = body.top_logprobs if body.logprobs else None
    return _as_given(validate(completion, schema.CompletionRequest), body.options)


def _as_given(made: BodyT, options: Options) -> BodyT:
    """Mark Ollama's defaults as not set, so that those of the model or adapter apply before them."""
    names = {one.option: one.name for one in parameters_of("ollama")} | {"stop": "stop", "seed": "seed"}
    for option in names.keys() - options.model_fields_set:
        made.model_fields_set.discard(names[option])
    return made


def check_thinking(body: OllamaChat | OllamaGenerate, thinks: bool) -> None:
    """thinks: whether the model can. Raises ApiError."""
    if body.think and not thinks:
        reason = f"{body.model!r} does not support thinking: leave think out, or set it to false"
        raise unsupported_field(reason, "think")


def _check(body: OllamaChat | OllamaGenerate) -> None:
    given = body.messages if isinstance(body, OllamaChat) else [body]
    if any(one.images for one in given):
        raise unsupported_field("images are not supported: this server takes text", "images")
    if isinstance(body, OllamaGenerate) and body.context:
        raise unsupported_field("context is not supported: send the conversation to /api/chat", "context")
    options = body.options
    if options.repeat_penalty != 1 and options.repeat_last_n not in (None, -1, 0):
        reason = "options.repeat_last_n must be -1: repeat_penalty applies to the whole output"
        raise invalid_value(reason, "options.repeat_last_n")


def _sampling(body: OllamaChat | OllamaGenerate, model: str) -> dict[str, Any]:
    options = body.options
    wanted: dict[str, Any] | None = None
    if body.format == "json":
        wanted = {"type": "json_object"}
    elif body.format != "":
        wanted = {"type": "json_schema", "json_schema": {"schema": body.format}}
    return {
        "model": model,
        "stream": body.stream,
        "max_tokens": options.num_predict if options.num_predict > 0 else None,
        **{one.name: getattr(options, one.option) for one in parameters_of("ollama")},
        "seed": None if options.seed == -1 else options.seed,
        "stop": options.stop,
        "repetition_penalty": 1.0 if options.repeat_last_n == 0 else options.repeat_penalty,
        "response_format": wanted,
    }


def _messages(body: OllamaChat) -> list[dict[str, Any]]:
    """A tool's result without an id belongs to the first open call of its name, or else to the first."""
    found: list[dict[str, Any]] = []
    open_calls: list[tuple[str, str]] = []  # ids and names
    number = 0
    for message in body.messages:
        shown: dict[str, Any] = {"role": message.role, "content": message.content}
        shown["reasoning_content"] = message.thinking
        if message.tool_calls:
            shown["tool_calls"] = []
        for call in message.tool_calls:
            call_id, number = call.id or f"call_{number}", number + 1
            open_calls.append((call_id, call.function.name))
            function = {"name": call.function.name, "arguments": json.dumps(call.function.arguments)}
            shown["tool_calls"].append({"id": call_id, "function": function})
        if message.role == "tool":
            name = message.tool_name or message.name
            own = next((one for one in open_calls if one[1] == name), next(iter(open_calls), ("call_0", "")))
            shown["tool_call_id"] = message.tool_call_id or own[0]
            open_calls = [one for one in open_calls if one[0] != shown["tool_call_id"]]
        found.append(shown)
    return found
