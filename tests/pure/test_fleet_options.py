"""Protects what a fleet makes of options and requests, and how replicas' exports are merged. Without Ray."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from manylora.adapters.catalog.names import Aliases
from manylora.doors.fleet.member import RemoteRequest, answer, merge_metrics, whole_answer
from manylora.doors.fleet.options import parse_options, read_args
from manylora.doors.fleet.routing import requested_adapter
from manylora.errors import ConfigError


def test_flags_and_the_args_of_an_application_mean_the_same(tmp_path: Path) -> None:
    flags = ["m", "--lora-root", str(tmp_path), "--replicas", "3", "--max-replicas", "5", "--pin", "a=2"]
    args = {"model": "m", "lora_root": [str(tmp_path)], "replicas": 3, "max_replicas": 5, "pin": ["a=2"]}
    assert parse_options(flags) == read_args(args)
    assert parse_options(flags).pin == (("a", 2),)
    assert (parse_options(flags).least_replicas, parse_options(flags).most_replicas) == (3, 5)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"restart": True}, "restart has no effect in a fleet: Ray starts"),
        ({"triton_url": "localhost:1"}, "triton_url has no effect in a fleet"),
        ({"replicas": 3, "max_replicas": 2}, "replicas must be from 3 to 2"),
        ({"min_replicas": 1}, "need max_replicas"),
        ({"pin": ["a=0"]}, "pin must be NAME or NAME=REPLICAS"),
        ({"repilcas": 3}, "repilcas"),
        ({"model": None}, "model"),
    ],
)
def test_what_cannot_act_is_refused_by_name(args: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_args({"model": "m", **args})


def test_the_ranks_of_a_replica_count_for_what_ray_gives_it(tmp_path: Path) -> None:
    two = {"model": "org/name", "replicas": 2, "tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    options = read_args({**two, "replica_cpus": 9})
    assert (options.ranks, options.threads({}), options.threads({"OMP_NUM_THREADS": "3"})) == (4, 2, None)
    assert read_args(two).cpus >= 4
    assert (options.gpus(0), options.gpus(8), read_args({**two, "replica_gpus": 4}).gpus(0)) == (0, 4, 4)
    with pytest.raises(ConfigError, match="2 replicas of 4 ranks need 8 GPUs, and there are 7"):
        options.gpus(7)
    with pytest.raises(ConfigError, match=r"replica_gpus must be 4, one for each rank, or 0; got 0\.5"):
        read_args({**two, "replica_gpus": 0.5}).gpus(8)
    alone = read_args({"model": "org/name", "replicas": 2})
    assert (alone.ranks, alone.threads({}), alone.gpus(1), alone.gpus(8)) == (1, None, 0.5, 1)


def test_metrics_of_replicas_become_one_text_with_a_label() -> None:
    text = '# HELP a Help\n# TYPE a gauge\na 1\na{x="}"} 2\n# HELP h H\n# TYPE h histogram\n'
    joined = merge_metrics(
        {"r1": f"{text}h_sum 3\nh_count 1\n", "r2": "# HELP a Help\n# TYPE a gauge\na 5\n"}
    )
    assert joined.splitlines() == [
        "# HELP a Help",
        "# TYPE a gauge",
        'a{replica="r1"} 1',
        'a{x="}",replica="r1"} 2',
        'a{replica="r2"} 5',
        "# HELP h H",
        "# TYPE h histogram",
        'h_sum{replica="r1"} 3',
        'h_count{replica="r1"} 1',
    ]


def call(path: str, body: bytes = b"") -> RemoteRequest:
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [(b"x-a", b"1")],
        "query_string": b"q=2",
    }
    return RemoteRequest.of(Request({**scope, "http_version": "1.1", "app": object()}), body)


def test_a_call_is_answered_by_an_application_elsewhere() -> None:
    async def echo(request: Request) -> PlainTextResponse:
        return PlainTextResponse(
            (await request.body()) + request.headers["x-a"].encode() + request.url.query.encode()
        )

    app = Starlette(routes=[Route("/echo", echo, methods=["POST"])])
    found = asyncio.run(whole_answer(app, call("/echo", b"body ")))
    assert (found.status_code, found.body) == (200, b"body 1q=2")


def test_closing_the_answer_is_seen_as_a_client_that_left() -> None:
    left = []

    async def endless(request: Request) -> StreamingResponse:
        async def lines():
            try:
                while True:
                    yield b"line\n"
                    await asyncio.sleep(0)
            finally:
                left.append(True)

        return StreamingResponse(lines())

    async def run() -> None:
        messages = answer(Starlette(routes=[Route("/", endless, methods=["POST"])]), call("/"))
        assert (await anext(messages))[0]["type"] == "http.response.start"
        await messages.aclose()

    asyncio.run(run())
    assert left


@pytest.mark.parametrize(
    ("fields", "adapter"),
    [
        ({}, None),
        ({"model": "base"}, None),
        ({"model": "a"}, "a"),
        ({"model": "a:latest"}, "a"),
        ({"model": "base:a"}, "a"),
        ({"model": "short"}, "long"),
        ({"model": "both"}, "a"),
        ({"model": "both", "safety_identifier": "user-6"}, "long"),
        ({"model": "base", "lora_request": {"lora_name": "a"}}, "a"),
        ({"model": "a+b"}, "a"),
        ({"model": "base", "lora": [{"name": "a", "scale": 0.5}, {"name": "b"}]}, "a"),
        ({"model": 1, "lora": [2], "lora_request": 3, "adapter_id": None}, None),
    ],
)
def test_the_adapter_that_is_asked_for(fields: dict[str, Any], adapter: str | None) -> None:
    assert requested_adapter(fields, ("base",), Aliases({"short": "long", "both": "a@1,long@1"})) == adapter
