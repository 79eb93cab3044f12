"""Protects the OpenAI server on Triton's engine: the reference's answers; clients that leave are noticed."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from launched import active, total
from penalties import most_probable, tensorrt_llm, vllm
from servers import Running as Triton
from servers import World
from serving import Running
from tiny_models import reference_generate
from waiting import wait_for

from manylora.errors import ConfigError
from manylora.generation.tokenizer import Tokenizer

NEW = 10
NUM = 16  # sequences


@pytest.fixture(scope="module")
def gateway(server: Triton, world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running(**world.gateway(server.grpc, tmp_path_factory.mktemp("gateway") / "named"))
    yield running
    running.close()


def expected(world: World, prompt: str, task_id: int | None, count: int = NEW) -> str:
    tokenizer = Tokenizer(world.model)
    adapter = world.adapters[task_id] if task_id else None
    return tokenizer.decode(reference_generate(world.model, adapter, tokenizer.encode(prompt), count))


@pytest.mark.quick
def test_adapters_by_name_in_company_answer_as_the_reference(gateway: Running, world: World) -> None:
    cases = [((None, 1, 2, 3, 4)[i % 5], "Hello "[: 1 + i % 6], i % 2 == 0) for i in range(30)]
    client = gateway.client()

    def one(case: tuple) -> str:
        task_id, prompt, stream = case
        model = f"adapter-{task_id}" if task_id else "base"
        body: dict[str, Any] = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": NEW}
        body["extra_body"] = {"ignore_eos": True}
        if stream:
            chunks = client.completions.create(**body, stream=True)
            return "".join(chunk.choices[0].text for chunk in chunks)
        return client.completions.create(**body).choices[0].text

    with ThreadPoolExecutor(10) as pool:
        found = list(pool.map(one, cases))
    assert found == [expected(world, prompt, task_id) for task_id, prompt, _ in cases]
    cards = {card["id"]: card for card in gateway.http.get("/v1/models").json()["data"]}
    assert cards["adapter-2"]["tier"] == "device" and cards["adapter-2"]["rank"] == 16


def test_fields_reach_the_engine_and_come_back(gateway: Running, world: World) -> None:
    client = gateway.client()
    body: dict[str, Any] = {"model": "adapter-2", "prompt": "abc", "max_tokens": 6}
    several = client.completions.create(**body, n=3, seed=4, temperature=2.0, logprobs=0, echo=True)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert len({choice.text for choice in several.choices}) > 1
    assert all(choice.text.startswith("abc") for choice in several.choices)
    again = client.completions.create(**body, n=3, seed=4, temperature=2.0)
    assert ["abc" + choice.text for choice in again.choices] == [choice.text for choice in several.choices]
    top = client.completions.create(**body, temperature=0, logprobs=3).choices[0].logprobs
    assert all(
        max(one.values()) == value for one, value in zip(top.top_logprobs, top.token_logprobs, strict=True)
    )
    ids = gateway.post("/tokenize", model="base", prompt="abc").json()["tokens"]
    for heat in (0.0, 0.5):  # with a temperature, top_k 1 takes the most probable token
        case = {"presence_penalty": -2.0, "frequency_penalty": -2.0, "temperature": heat}
        penalised = gateway.post(**body, **case, top_k=1, ignore_eos=True).json()["choices"][0]["text"]
        truth = most_probable(vllm, world.model, world.adapters[2], ids, 6, **case)
        assert penalised == Tokenizer(world.model).decode(truth), heat
        assert truth != most_probable(tensorrt_llm, world.model, world.adapters[2], ids, 6, **case)
    [letter] = gateway.post("/tokenize", prompt="z", add_special_tokens=False).json()["tokens"]
    biased = client.completions.create(**body, temperature=0, logit_bias={str(letter): 100})
    assert biased.choices[0].text == "z" * 6
    narrow = client.completions.create(**body, temperature=50.0, seed=1, extra_body={"min_p": 1.0})
    assert narrow.choices[0].text == client.completions.create(**body, temperature=0).choices[0].text
    bound = gateway.post(**body, response_format={"type": "regex", "regex": "(yes|no)"})
    assert bound.json()["choices"][0]["text"] in ("yes", "no")
    bad = gateway.post(**body, response_format={"type": "regex", "regex": "("})
    assert (bad.status_code, bad.json()["error"]["code"]) == (400, "invalid_response_format")
    chat = gateway.post("/v1/chat/completions", model="base", messages=[{"role": "user", "content": "a"}])
    assert chat.status_code == 200
    assert gateway.http.get("/health/model").status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_stops_the_engine(gateway: Running, server: Triton, stream: bool) -> None:
    def ended(label: str = "") -> float:
        return total(server, "manylora_adapter_requests_total", label)

    def cancelled() -> float:
        return ended('finish_reason="cancelled"')

    body = {"model": "base", "prompt": "a", "n": NUM, "max_tokens": 250, "ignore_eos": True, "stream": stream}
    text = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json"
    # The gauge is of the last stats period: it may still show the request of the test before.
    wait_for(lambda: active(server) == 0)
    all_before, cancelled_before = ended(), cancelled()
    with server.slow():
        raw = socket.create_connection(("127.0.0.1", int(gateway.url.rpartition(":")[2])))
        raw.sendall("\r\n".join([*head, f"Content-Length: {len(text)}", "", ""]).encode() + text)
        # Until the engine has all: a sequence whose client leaves before that never comes to Triton.
        wait_for(lambda: active(server) == NUM or ended() == all_before + NUM)
        raw.close()
        wait_for(lambda: ended() == all_before + NUM)
    assert cancelled() - cancelled_before == NUM


def test_what_cannot_be_connected_says_so(world: World, server: Triton) -> None:
    with pytest.raises(ConfigError, match="does not answer"):
        Running(model=world.model, device="auto", triton_url="127.0.0.1:1")
    with pytest.raises(ConfigError, match="does not answer"):
        Running(model=world.model, device="auto", triton_url=f"127.0.0.1:{server.grpc}", triton_model="no")
    with pytest.raises(ConfigError, match="device has no effect"):
        Running(model=world.model, device="cpu", triton_url=f"127.0.0.1:{server.grpc}")
