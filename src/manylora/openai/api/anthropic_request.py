"""Request bodies of Anthropic's Messages API, and their conversion to chats."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, create_model, model_validator

from manylora.openai.api.errors import FORMAT
from manylora.openai.api.parsing import validate
from manylora.openai.api.schema import MAX_TOKENS, Body, ChatRequest, Items, Text, WordText, sampling_fields

# This API's names for fields of chats.
NAMES = {"stop": "stop_sequences", FORMAT: "output_config", "chat_template_kwargs": "thinking"}


class _Block(Body):
    """cache_control has no effect: prompts are always cached."""

    cache_control: dict[str, Any] | None = None


class TextBlock(_Block):
    type: Literal["text"]
    text: str
    citations: Items[dict[str, Any]] = Field([], max_length=0)


class ThinkingBlock(_Block):
    """The model does not see it again."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: str = ""
    signature: str = ""
    data: str = ""


class ToolUseBlock(_Block):
    type: Literal["tool_use"]
    id: Text
    name: str = Field(min_length=1, max_length=64)
    input: dict[str, Any]
    caller: dict[str, Any] | None = None
    toolset_name: Text | None = None


class ToolResultBlock(_Block):
    """is_error has no effect: the content says what went wrong."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: str | Items[TextBlock] = ""
    is_error: bool = False
    toolset_name: Text | None = None


Block = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class AnthropicMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[Items[Block], Field(max_length=4096)]


class AnthropicTool(_Block):
    """A function of the client. eager_input_streaming and input_examples have no effect."""

    type: Literal["custom"] = "custom"
    name: str = Field(pattern="^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool = False
    eager_input_streaming: bool | None = None
    input_examples: Items[dict[str, Any]] = Field([])
    allowed_callers: Items[Literal["direct"]] | None = None
    defer_loading: Literal[False] = False


class ToolChoice(Body):
    """name: of the tool, for type tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _has_name(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("type tool needs the name of a tool, and no other type takes one")
        return self


class Thinking(Body):
    """The output is not split: what the model thinks is part of its text. budget_tokens and display have no
    effect.
    """

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    display: Text | None = None


class _JsonFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """effort has no effect."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: _JsonFormat | None = None


class CountTokensRequest(Body):
    """What makes the prompt. model: the base model, an adapter or an alias."""

    model: str = Field(min_length=1, max_length=512)
    messages: Items[AnthropicMessage] = Field(min_length=1, max_length=4096)
    system: str | Annotated[Items[TextBlock], Field(max_length=4096)] = ""
    tools: Items[AnthropicTool] = Field([], max_length=128)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None


if TYPE_CHECKING:
    SamplingFields = Body
else:
    SamplingFields = create_model("SamplingFields", __base__=Body, **sampling_fields("anthropic"))


class MessagesRequest(CountTokensRequest, SamplingFields):
    """metadata, service_tier, speed and inference_geo have no effect."""

    max_tokens: int = Field(ge=1, le=MAX_TOKENS)
    stop_sequences: Items[WordText] = Field([], max_length=16)
    stream: bool = False
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    speed: Literal["standard", "fast"] | None = None
    inference_geo: Text | None = None


def chat_request(body: CountTokensRequest) -> ChatRequest:
    """Raises ApiError."""
    chat: dict[str, Any] = {"model": body.model, "messages": _messages(body)}
    if body.messages[-1].role == "assistant":  # the output continues it
        chat["continue_final_message"] = True
    if body.thinking is not None:  # the variable that templates of reasoning models use
        chat["chat_template_kwargs"] = {"enable_thinking": body.thinking.type != "disabled"}
    chat |= {"tools": [_tool(tool) for tool in body.tools], **_choice(body.tool_choice)}
    if body.output_config is not None and body.output_config.format is not None:
        schema = body.output_config.format.schema_
        chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}
    if isinstance(body, MessagesRequest):
        chat |= {"max_tokens": body.max_tokens, "stop": body.stop_sequences, "stream": body.stream}
        given = body.model_fields_set & SamplingFields.model_fields.keys()  # else the model's defaults apply
        chat |= {name: getattr(body, name) for name in given}
    return validate(chat, ChatRequest)


def _messages(body: CountTokensRequest) -> list[dict[str, Any]]:
    """A message's tool results come first, then its text."""
    found = [{"role": "system", "content": _text(body.system)}] if body.system else []
    for message in body.messages:
        blocks = [] if isinstance(message.content, str) else message.content
        for block in blocks:
            if isinstance(block, ToolResultBlock):
                result = {"tool_call_id": block.tool_use_id, "content": _text(block.content)}
                found.append({"role": "tool", **result})
        calls = [
            {"id": one.id, "function": {"name": one.name, "arguments": json.dumps(one.input)}}
            for one in blocks
            if isinstance(one, ToolUseBlock)
        ]
        texts = [one for one in blocks if isinstance(one, TextBlock)]
        shown: dict[str, Any] = {"role": message.role, "content": _text(texts if blocks else message.content)}
        if calls:
            shown["tool_calls"] = calls
        if texts or calls or not any(isinstance(one, ToolResultBlock) for one in blocks):
            found.append(shown)
    return found


def _text(content: Any) -> str:
    """content: a text, or blocks of text."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _tool(tool: AnthropicTool) -> dict[str, Any]:
    function = {"name": tool.name, "parameters": tool.input_schema, "strict": tool.strict}
    return {"type": "function", "function": function | {"description": tool.description or ""}}


def _choice(choice: ToolChoice | None) -> dict[str, Any]:
    if choice is None:
        return {}
    named = {"type": "function", "function": {"name": choice.name}}
    kinds = {"auto": "auto", "any": "required", "tool": named, "none": "none"}
    parallel = not choice.disable_parallel_tool_use
    return {"tool_choice": kinds[choice.type], "parallel_tool_calls": parallel}
