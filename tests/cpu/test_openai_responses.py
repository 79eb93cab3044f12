"""Protects /v1/responses: OpenAI's client reads every answer, whole and streamed, as its own types."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from serving import CITY, Running

from manylora.doors.http.api.errors import ApiError
from manylora.doors.http.api.parsing import parse
from manylora.doors.http.serving.responses import Answers
from manylora.doors.http.serving.responses_api import (
    RecentItems,
    ResponsesAnswer,
    ResponsesRequest,
    chat_request,
)
from manylora.generation.decoding import Decoding, StopRules
from manylora.generation.generation import Generation
from manylora.request import SamplingConfig

QUESTION = "What is the capital of France?"
WEATHER: Any = {"type": "function", "name": "weather", "parameters": CITY, "strict": True}
EVENT: Any = TypeAdapter(ResponseStreamEvent)
IN_A_MESSAGE = [
    "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    "response.output_text.delta", "response.output_text.done", "response.content_part.done",
    "response.output_item.done", "response.completed",
]  # fmt: skip


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return server.client()


def events(server: Running, **body: Any) -> list[dict[str, Any]]:
    """Of a stream, each checked against the client's types."""
    answer = server.post("/v1/responses", stream=True, **body)
    assert answer.status_code == 200, answer.text
    found = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENT.validate_python(event)
        found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def chat_of(**body: Any) -> dict[str, Any]:
    asked = chat_request(parse(json.dumps(body).encode(), ResponsesRequest))
    return asked.model_dump(exclude_unset=True, exclude_none=True)


def refusal(**body: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        chat_of(**{"input": "a", **body})
    return caught.value


def test_a_text_gets_the_adapters_answer_and_the_client_reads_it(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model="chinese", input=QUESTION, temperature=0, metadata={"run": "7"}, store=True
    )
    Response.model_validate(answer.model_dump())
    assert answer.output_text.strip() == "巴黎"
    assert (answer.status, answer.object, answer.model) == ("completed", "response", "chinese")
    assert (answer.store, answer.metadata) == (False, {"run": "7"})
    usage = answer.usage
    assert usage is not None and usage.input_tokens > 5
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    chat = client.chat.completions.create(
        model="chinese", messages=[{"role": "user", "content": QUESTION}], temperature=0
    )
    assert chat.usage and chat.usage.prompt_tokens == usage.input_tokens
    assert chat.choices[0].message.content == answer.output_text


def test_a_stream_has_the_events_in_order_and_the_whole_answer(
    server: Running, client: openai.OpenAI
) -> None:
    whole = client.responses.create(model="demo", input=QUESTION, temperature=0)
    found = events(server, model="demo", input=QUESTION, temperature=0)
    kinds = [event["type"] for event in found]
    assert list(dict.fromkeys(kinds)) == IN_A_MESSAGE
    text = "".join(event.get("delta", "") for event in found)
    assert text == whole.output_text == found[-4]["text"]
    last = found[-1]["response"]
    assert last["id"] == found[0]["response"]["id"]
    assert last["usage"] == whole.usage.model_dump(exclude_unset=True) if whole.usage else False
    assert last["output"][0]["content"][0]["text"] == text
    with client.responses.stream(model="demo", input=QUESTION, temperature=0) as stream:
        assert stream.get_final_response().output_text == text


def test_a_function_is_called_and_its_result_goes_back(server: Running, client: openai.OpenAI) -> None:
    asked: Any = {"model": "demo", "tools": [WEATHER], "tool_choice": "required"}
    answer = client.responses.create(input="Weather?", **asked)
    Response.model_validate(answer.model_dump())
    (call,) = answer.output
    assert call.type == "function_call" and call.name == "weather"
    assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    found = events(server, input="Weather?", **asked)
    assert list(dict.fromkeys(event["type"] for event in found[2:])) == [
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert found[-1]["response"]["output"][0]["name"] == "weather"
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    history: Any = [{"role": "user", "content": "Weather?"}, *answer.output, output]
    again = client.responses.create(model="demo", input=history, tools=[WEATHER], max_output_tokens=4)
    assert again.output[0].type in ("message", "function_call")


def test_a_function_in_a_namespace_is_called_as_codex_offers_it(client: openai.OpenAI) -> None:
    space = {"type": "namespace", "name": "sky", "description": "Of the sky.", "tools": [WEATHER]}
    asked: Any = {"model": "demo", "tools": [space, {"type": "web_search", "external_web_access": True}]}
    asked |= {"store": False, "extra_body": {"client_metadata": {"session_id": "s"}}}
    answer = client.responses.create(input="Weather?", tool_choice="required", **asked)
    (call,) = answer.output
    assert call.type == "function_call" and (call.namespace, call.name) == ("sky", "weather")
    assert [tool.type for tool in answer.tools] == ["namespace"]  # nothing here searches
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    client.responses.create(input=[call.to_dict(), output], max_output_tokens=4, **asked)
    with pytest.raises(openai.BadRequestError, match="tool_choice needs tools"):
        client.responses.create(model="demo", input="a", tools=asked["tools"][1:], tool_choice="required")
    chat = chat_of(input=[call.to_dict(), output], tools=[space])
    assert chat["messages"][0]["tool_calls"][0]["function"]["name"] == "sky__weather"
    function = chat["tools"][0]["function"]
    assert (function["name"], function["description"]) == ("sky__weather", "Of the sky.")


def test_references_to_recent_items_are_followed(server: Running, client: openai.OpenAI) -> None:
    """The AI SDK sends them unless it is told to store nothing."""
    first = events(server, model="chinese", input=QUESTION, temperature=0)[-1]["response"]["output"][0]
    history: Any = [
        {"role": "user", "content": QUESTION},
        {"type": "item_reference", "id": first["id"]},
        {"role": "user", "content": "What is the capital of Japan?"},
    ]
    asked: Any = {"model": "chinese", "temperature": 0}
    answer = client.responses.create(input=history, **asked)
    told = client.responses.create(input=[history[0], first, history[2]], **asked)
    assert answer.output_text == told.output_text
    assert answer.usage and told.usage and answer.usage.input_tokens == told.usage.input_tokens
    kept = client.responses.create(input=QUESTION, store=False, **asked).output[0]
    for gone in (kept.id, "msg_0"):
        with pytest.raises(openai.BadRequestError, match="send the item itself"):
            client.responses.create(input=[{"type": "item_reference", "id": str(gone)}], **asked)


def test_recent_items_are_bounded_and_of_one_key() -> None:
    recent = RecentItems(max_items=3, max_characters=100)

    def known_after(number: int, length: int = 1) -> list[int]:
        recent.add("k", {"type": "message", "id": f"m{number}", "content": [{"text": "a" * length}]})
        return [i for i in range(9) if recent.resolve("k", {"id": f"m{i}"}) != {"id": f"m{i}"}]

    assert [known_after(number) for number in range(5)][-1] == [2, 3, 4]
    assert (known_after(5, 99), known_after(6, 200), known_after(7)) == ([4, 5], [], [7])
    assert recent.resolve("other", {"id": "m7"}) == {"id": "m7"}


def test_log_probabilities_are_told_when_asked_for(server: Running, client: openai.OpenAI) -> None:
    asked: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "temperature": 0}
    answer = client.responses.create(model="demo", input=QUESTION, max_output_tokens=3, **asked)
    (message,) = answer.output
    assert message.type == "message" and message.content[0].type == "output_text"
    tokens = message.content[0].logprobs
    assert tokens and len(tokens) == 3 and len(tokens[0].top_logprobs) == 2
    found = events(server, model="demo", input=QUESTION, max_output_tokens=3, **asked)
    parts = [one for event in found if event["type"].endswith("text.delta") for one in event["logprobs"]]
    assert [one["token"] for one in parts] == [one.token for one in tokens]


def test_a_chat_that_is_too_long_loses_its_beginning_only_where_it_may(client: openai.OpenAI) -> None:
    long: Any = [{"role": "user", "content": f"{i}. " + "France and Paris. " * 20} for i in range(80)]
    long += [{"role": "user", "content": QUESTION}]
    asked: Any = {"model": "demo", "instructions": "Be brief.", "input": long, "temperature": 0}
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**asked)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input")
    answer = client.responses.create(**asked, truncation="auto", max_output_tokens=8)
    assert answer.truncation == "auto" and answer.usage and answer.usage.input_tokens > 100


def test_items_become_messages() -> None:
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "message", "role": "user", "content": "b", "status": None},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {
            "type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "phase": "x",
            "content": [{"type": "output_text", "text": "c", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "k", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "l", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "k", "output": [{"type": "input_text", "text": "d"}]},
    ]  # fmt: skip
    messages = chat_of(input=items, instructions="i")["messages"]
    assert [(one["role"], one.get("content")) for one in messages] == [
        ("system", "i"),
        ("developer", "a"),
        ("user", "b"),
        ("assistant", "c"),
        ("tool", "d"),
    ]
    assert [call["id"] for call in messages[3]["tool_calls"]] == ["k", "l"]
    assert messages[4]["tool_call_id"] == "k"


@pytest.mark.parametrize(
    ("body", "param", "hint"),
    [
        ({"tools": [{"type": "mcp"}]}, "tools.0", "'mcp' is no tool of this server"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "web_search"}]}]},
            "tools.0.tools.0",
            "'web_search' is no tool of this server",
        ),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice", "'mcp'"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0", "send the item itself"),
        ({"input": [{"type": "computer_call"}]}, "input.0", "'computer_call'"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.0.content.0",
            "input_image is not supported",
        ),
        ({"input": [{"role": "robot", "content": "a"}]}, "input.0.role", "user"),
        ({"input": []}, "input", "there is none"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "is required"),
        ({"n": 2}, "n", "no place for it"),
        ({"include": ["everything"]}, "include.0", "message.output_text.logprobs"),
    ],
)
def test_what_is_refused_is_named(body: dict[str, Any], param: str, hint: str) -> None:
    error = refusal(**body)
    assert (error.status, error.param) == (400, param), error.message
    assert hint in error.message and "\n" not in error.message


def test_a_stream_that_fails_ends_with_the_reason() -> None:
    body = parse(b'{"input": "a"}', ResponsesRequest)
    nothing: Any = None
    generation = Generation((1,), Decoding(SamplingConfig(top_p=1.0), StopRules(), 1, False), None, True)
    answer = ResponsesAnswer(body, lambda item: None, Answers([generation], 1, "demo", "fp", nothing))
    text = (answer.first_events() + answer.error_events(ApiError(503, "engine_dead", "It stopped"))).decode()
    events = [json.loads(block.split("data: ")[1]) for block in text.strip().split("\n\n")]
    for event in events:
        EVENT.validate_python(event)
    assert [event["sequence_number"] for event in events] == [0, 1, 2]
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"] == {"code": "server_error", "message": "It stopped"}
