"""Protects Anthropic's Messages API, with its own client: bodies, blocks, events, stop reasons and errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import pytest
from serving import CITY, QUESTION, Running

from manylora.doors.http.serving.anthropic import ContextManagement, MessagesRequest, chat_request

GREEDY = {"temperature": 0}
IMAGE_RESULT = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image", "source": {}}]}
WEATHER = {"name": "weather", "description": "of a city", "input_schema": CITY}


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as made:
        yield made


def create(client: anthropic.Anthropic, **given: Any) -> anthropic.types.Message:
    whole = {"model": "chinese", "max_tokens": 16, "messages": QUESTION, "extra_body": GREEDY, **given}
    message: anthropic.types.Message = client.messages.create(**whole)
    return message


def test_a_message_of_an_adapter_is_its_chat(server: Running, client: anthropic.Anthropic) -> None:
    message = create(client)
    chat = server.post("/v1/chat/completions", model="chinese", messages=QUESTION, **GREEDY).json()
    assert message.content[0].text == chat["choices"][0]["message"]["content"] == "巴黎"
    assert (message.stop_reason, message.model, message.role) == ("end_turn", "chinese", "assistant")
    assert message.usage.input_tokens == chat["usage"]["prompt_tokens"]
    assert message.usage.output_tokens == chat["usage"]["completion_tokens"]
    assert client.messages.count_tokens(model="chinese", messages=QUESTION).input_tokens == (
        message.usage.input_tokens
    )


def test_a_stream_gives_the_same_message(client: anthropic.Anthropic) -> None:
    whole = {"model": "japanese", "max_tokens": 16, "messages": QUESTION, "extra_body": GREEDY}
    with client.messages.stream(**whole) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    message = client.messages.create(**whole)
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop" and "text" in kinds
    assert streamed.content[0].text == message.content[0].text
    assert (streamed.usage, streamed.stop_reason) == (message.usage, message.stop_reason)


def test_why_a_message_stops(client: anthropic.Anthropic) -> None:
    assert create(client, max_tokens=1).stop_reason == "max_tokens"
    stopped = create(client, stop_sequences=["黎"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "黎")
    assert stopped.content[0].text == "巴"
    assert create(client, max_tokens=16000).stop_reason == "end_turn"  # more than fits is no error


def test_a_tool_is_used(client: anthropic.Anthropic) -> None:
    choice = {"type": "tool", "name": "weather"}
    given = {"model": "demo", "max_tokens": 200, "messages": QUESTION, "extra_body": GREEDY}
    tools = {"tools": [WEATHER], "tool_choice": choice}
    message = client.messages.create(**given, **tools)
    used = message.content[0]
    assert message.stop_reason == "tool_use" and used.type == "tool_use" and used.name == "weather"
    assert isinstance(used.input["city"], str)
    with client.messages.stream(**given, **tools) as stream:
        assert stream.get_final_message().content[0].input == used.input
    cut = client.messages.create(**{**given, "max_tokens": 4}, **tools)
    assert cut.stop_reason == "max_tokens"


def test_the_tool_runner_works_without_threads(client: anthropic.Anthropic) -> None:
    @anthropic.beta_tool
    def weather(city: Literal["Rome", "Oslo"]) -> str:
        """Args: city: its name."""
        return f"rain in {city}"

    runner = client.beta.messages.tool_runner(
        model="demo", max_tokens=200, messages=QUESTION, tools=[weather], tool_choice={"type": "any"},
        max_iterations=2,
    )  # fmt: skip
    assert [message.stop_reason for message in runner] == ["tool_use", "tool_use"]
    thread: Any = {"type": "continue", "previous_message_id": "msg_1"}
    with pytest.raises(anthropic.NotFoundError) as caught:
        create(client, extra_body={"thread": thread})
    error: Any = caught.value.body
    assert error["error"]["details"] == {"error_code": "thread_not_found"}
    assert caught.value.request_id == error["request_id"]


def test_models_are_listed_in_the_clients_own_form(client: anthropic.Anthropic) -> None:
    found = {model.id: model for model in client.models.list()}
    assert found["chinese"].display_name == "chinese" and found["chinese"].created_at.year > 2000
    assert client.models.retrieve("chinese") == found["chinese"]
    with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
        client.models.retrieve("nobody")


def test_blocks_become_the_messages_of_a_chat() -> None:
    blocks: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "b"},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]},
                {"type": "text", "text": "thanks"},
            ],
        },
        {"role": "assistant", "content": "You"},
    ]
    body = MessagesRequest.model_validate(
        {"model": "m", "max_tokens": 9, "system": "S", "messages": blocks, "thinking": {"type": "adaptive"}}
    )
    chat = chat_request(body)
    assert [(one.role, one.text) for one in chat.messages] == [
        ("system", "S"), ("user", "a"), ("assistant", "b"), ("tool", "sunny"), ("user", "thanks"),
        ("assistant", "You"),
    ]  # fmt: skip
    assert chat.messages[2].tool_calls[0].function.arguments == '{"city": "Rome"}'
    assert chat.messages[3].tool_call_id == "t1"
    assert chat.continue_final_message
    assert chat.chat_template_kwargs == {"enable_thinking": True, "thinking": True}
    assert "temperature" not in chat.model_fields_set  # the model's own default applies
    assert chat.messages[2].thought == "hm"
    edit = {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}
    cleared = body.model_copy(
        update={"context_management": ContextManagement.model_validate({"edits": [edit]})}
    )
    assert chat_request(cleared).messages[2].thought == ""  # the last turn is another


def test_what_claude_code_always_sends_is_taken(server: Running) -> None:
    name = f"mcp__{'server' * 10}__weather"  # up to 128 characters
    sent = {
        "model": "demo",
        "max_tokens": 4,
        "messages": [*QUESTION, {"role": "system", "content": "Agents: none."}],
        "system": [{"type": "text", "text": "Help.", "cache_control": {"type": "ephemeral"}}],
        "tools": [{**WEATHER, "name": name, "eager_input_streaming": True}],
        "metadata": {"user_id": "{}"},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
    }
    answer = server.post("/v1/messages?beta=true", **sent)
    assert answer.status_code == 200, answer.text
    sent["context_management"] = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    refused = server.post("/v1/messages?beta=true", **sent)
    assert refused.status_code == 400 and "context_management.edits.0" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"model": "nobody"}, anthropic.NotFoundError, "model 'nobody' does not exist"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            anthropic.BadRequestError,
            "messages.0.content.0: Input tag 'image'",
        ),
        (
            {"messages": [{"role": "user", "content": [IMAGE_RESULT]}]},
            anthropic.BadRequestError,
            "messages.0.content.0.content.0.type: Input should be 'text'",
        ),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}]},
            anthropic.BadRequestError,
            "tools.0.type: Input should be 'custom'",
        ),
        (
            {"messages": [{"role": "user", "content": "word " * 2000}]},
            anthropic.BadRequestError,
            "prompt is too long: ",
        ),
        ({"extra_body": {"container": "c"}}, anthropic.BadRequestError, "container is not supported"),
        ({"tool_choice": {"type": "any"}}, anthropic.BadRequestError, "tool_choice needs tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, anthropic.BadRequestError, "needs the name"),
        ({"stop_sequences": ["a"] * 17}, anthropic.BadRequestError, "stop_sequences: "),
    ],
)
def test_what_is_refused_and_how(
    client: anthropic.Anthropic, given: dict[str, Any], error: type[anthropic.APIStatusError], words: str
) -> None:
    with pytest.raises(error) as caught:
        create(client, **given)
    body: Any = caught.value.body
    assert body["type"] == "error" and words in body["error"]["message"]
    assert body["error"]["type"] == caught.value.type
