"""Protects the parts of the OpenAI server alone: fair turns, keys, options, adapters that are kept."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from serving import DEMO

from manylora import cli
from manylora.adapters.catalog.names import is_name
from manylora.doors.http.api.errors import ApiError
from manylora.doors.http.api.params import Limits, plan
from manylora.doors.http.api.schema import CompletionRequest
from manylora.doors.http.app import FREE, ROUTES
from manylora.doors.http.serving.fair_queue import FairQueue
from manylora.doors.http.serving.keys import ApiKey, Keyring
from manylora.doors.http.serving.responses import Answers, ChatResponse, CompletionResponse, ResponseBuilder
from manylora.errors import ConfigError
from manylora.generation.generation import Generation
from manylora.generation.tokenizer import Tokenizer
from manylora.model.checkpoint import read_model_config
from manylora.request import Event


def served(requests: list[tuple[str, int, int]], output: int = 0) -> list[str]:
    """The order in which these wait for one slot: key, tokens, priority."""

    async def run() -> list[str]:
        queue, order = FairQueue(1), []

        async def one(key: str, tokens: int, priority: int) -> None:
            async with queue.turn(key, 1, tokens, priority):
                order.append(key)
                await asyncio.sleep(0)
                queue.count_output(key, output if key == "long" else 0)

        await asyncio.gather(*(one(*request) for request in requests))
        assert queue.num_waiting == 0 and not queue.waiting_keys
        return order

    return asyncio.run(run())


def test_turns_are_shared_by_tokens() -> None:
    order = served([*[("hot", 1, 0)] * 100, *((key, 1, 0) for key in "abc")])
    assert len(order) == 103 and max(order.index(key) for key in "abc") < 12  # next, not last
    both = [("long", 1000, 0), ("short", 100, 0)] * 11
    order = served(both)
    assert order[:2] == ["long", "short"] and order.index("long", 1) == 11  # 10 of 100 for one of 1000
    assert order[12:].count("short") == 1
    order = served([("long", 100, 0), ("short", 100, 0)] * 11, output=450)
    assert order.index("long", 1) == 11  # outputs count, too


def test_who_has_not_waited_gets_no_turns_for_it() -> None:
    """After 50 requests alone an adapter is not behind one that comes now, nor far before it."""

    async def run() -> list[str]:
        queue, order = FairQueue(1), []

        async def one(key: str) -> None:
            async with queue.turn(key, 1, 10):
                order.append(key)
                await asyncio.sleep(0)

        old = [asyncio.create_task(one("old")) for _ in range(60)]
        while len(order) < 50:
            await asyncio.sleep(0)
        new = [asyncio.create_task(one("new")) for _ in range(10)]
        await asyncio.gather(*old, *new)
        return order[50:]

    order = asyncio.run(run())
    assert 4 <= order[:12].count("new") <= 8, order


def test_priority_comes_before_turns() -> None:
    order = served([("a", 1, 0), ("a", 1, 5), ("a", 1, 0), ("b", 9, -1), ("b", 9, -1), ("c", 1, 0)])
    assert order[:3] == ["a", "b", "b"] and order[-1] == "a", order


def test_who_waits_behind_a_large_request_goes_when_that_is_cancelled() -> None:
    async def run() -> None:
        queue, order = FairQueue(2), []

        async def one(key: str, cost: int) -> None:
            async with queue.turn(key, cost):
                order.append(key)
                await asyncio.sleep(3600)

        tasks = [asyncio.create_task(one(*each)) for each in (("a", 1), ("large", 2), ("b", 1))]
        await asyncio.sleep(0)
        tasks[1].cancel()
        for _ in range(3):
            await asyncio.sleep(0)
        assert order == ["a", "b"]
        for task in tasks:
            task.cancel()

    asyncio.run(run())


def test_turns_are_given_back_by_who_is_cancelled_and_the_line_has_an_end() -> None:
    async def run() -> None:
        queue = FairQueue(1, max_waiting=2)
        inside, leave = asyncio.Event(), asyncio.Event()

        async def hold(key: str) -> None:
            async with queue.turn(key, 1):
                inside.set()
                await leave.wait()

        first = asyncio.create_task(hold("a"))
        await inside.wait()
        waiting = [asyncio.create_task(hold("a")), asyncio.create_task(hold("b"))]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="Too many requests wait") as error:
            await hold("c")
        assert (error.value.status, error.value.retry_after) == (429, 1)
        waiting[0].cancel()
        await asyncio.sleep(0)
        assert queue.waiting_keys == ["b"]
        leave.set()
        await asyncio.gather(first, waiting[1])
        assert queue.num_waiting == 0

    asyncio.run(run())


def test_a_key_has_its_rate_and_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("manylora.doors.http.serving.keys.time.monotonic", lambda: now)
    key = ApiKey("k", requests_per_minute=3, max_concurrent=1)
    for _ in range(3):
        with key.request():
            pass
    with pytest.raises(ApiError, match="3 requests in a minute") as error, key.request():
        pass
    assert (error.value.status, error.value.code, error.value.retry_after) == (429, "rate_limit_exceeded", 20)
    now += 20.5
    with key.request(), pytest.raises(ApiError, match="1 requests at one time"), key.request():
        pass
    with pytest.raises(ApiError, match="in a minute"), key.request():
        pass


def test_every_route_counts_towards_a_keys_limits_or_says_why_not() -> None:
    names = {name for _, _, name in ROUTES}
    assert set(FREE) <= names and all(FREE.values())
    assert names - set(FREE) == {
        "completions", "chat", "responses", "tokenize", "detokenize", "tokenizer_info",
        *(f"adapters.{name}" for name in ("load", "unload", "pin", "put", "delete")),
        *(f"ollama.{name}" for name in ("chat", "generate", "embed", "embeddings", "show")),
        *(f"pooled.{name}" for name in ("embeddings", "classify", "score", "rerank", "pooling")),
        *(f"batches.{name}" for name in ("upload", "delete", "content", "create", "cancel")),
        "messages", "count_tokens", "tgi.generate", "tgi.generate_stream", "tgi.compat",
        "tinker.create_sampling_session", "reset_prefix_cache",
        "sleep", "wake_up", "is_sleeping",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({}, "must have sha256"),
        ({"sha256": "abc"}, "64 hexadecimal"),
        ({"sha256": "a" * 64, "adapters": "x"}, "adapters: .* valid list"),
        ({"sha256": "a" * 64, "admin": 1}, "admin: .* valid boolean"),
        (
            {"sha256": "a" * 64, "requests_per_minute": -1},
            "minute: .* greater than or equal to 0",
        ),
    ],
)
def test_key_files_that_are_wrong_are_refused(tmp_path: Path, entry: dict[str, Any], words: str) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(json.dumps({"keys": [entry]}), encoding="utf-8")
    with pytest.raises(ConfigError, match=words):
        Keyring(file)


def test_a_key_is_known_by_its_hash_and_sees_its_patterns(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    digest = hashlib.sha256(b"secret").hexdigest()
    file.write_text(f"keys:\n- sha256: {digest}\n  adapters: ['team-a/*']\n  base: false\n", encoding="utf-8")
    key = Keyring(file).identify("Bearer secret")
    assert key.may_see("team-a/x") and not key.may_see("team-b/x") and not key.may_see(None)
    for wrong in ("", "Bearer", "Bearer Secret", "Basic secret", f"Bearer {digest}"):
        with pytest.raises(ApiError) as error:
            Keyring(file).identify(wrong)
        assert error.value.status == 401


@pytest.mark.parametrize(
    ("name", "good"),
    [
        ("sql-lora", True), ("team/a:v1.2", True), ("x" * 128, True), ("x" * 129, False), ("", False),
        ("a..b", False), ("../x", False), ("/x", False), ("a//b", False), ("a,b", False), ("ü", False),
        ("a\n", False), ("./a", False),
    ],
)  # fmt: skip
def test_names(name: str, good: bool) -> None:
    assert is_name(name) == good


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lora_config: {max_rank: 8}", "did you mean max_lora_rank"),
        ("frobnicate: 1", "options are host, port"),
        ("[1]", "must hold options"),
        ("open_metrics: 'yes'", "true or false"),
        ("a: [", "cannot be read"),
    ],
)
def test_files_of_options_that_are_wrong_say_what_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(text, encoding="utf-8")
    assert cli.main(["serve", str(DEMO / "base"), "--config", str(file)]) == 1
    [line] = capsys.readouterr().err.strip().splitlines()[:1]
    assert words in line


@pytest.mark.parametrize("kind", [CompletionResponse, ChatResponse])
def test_a_chunk_holds_any_text(kind: type[ResponseBuilder]) -> None:
    tokenizer = Tokenizer(DEMO / "base")
    text = 'a "b"\\\n\t\u2028 华 👩‍👩‍👧 </script>'
    body: Any = {"prompt": "a", "stream": True}
    limits = Limits(512, tokenizer.vocab_size)
    request = CompletionRequest.model_validate(body)
    made = plan(request, 1, tokenizer, read_model_config(DEMO / "base"), limits)
    generation = Generation((1,), made, tokenizer, True)
    reply = kind(Answers([generation], 1, 'x"y', "fp", tokenizer))
    generation.take(Event(tuple(tokenizer.encode(text))))
    found = json.loads(reply.new_events().decode().removeprefix("data: "))
    [choice] = found["choices"]
    assert found["model"] == 'x"y'
    assert (choice["text"] if kind is CompletionResponse else choice["delta"]["content"]) == text


def test_a_request_of_more_sequences_than_may_wait_is_refused_at_once() -> None:
    queue = FairQueue(2, 3)
    queue.check_room(5)
    queue.check_room(1)
    with pytest.raises(ApiError, match="Too many requests"):
        queue.check_room(6)
    FairQueue(2).check_room(10**6)
