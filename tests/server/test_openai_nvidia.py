"""Protects the OpenAI server in front of NVIDIA's own `tensorrt_llm` model: a stand-in with the tensors of
tensorrtllm_backend v0.19 and its way with adapters, run by the real server."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from penalties import most_probable, tensorrt_llm, vllm
from servers import ROOT, World, served
from servers import Running as Triton
from serving import Running
from standin.config import config
from tiny_models import reference_generate

from manylora.generation.tokenizer import Tokenizer

NEW = 8
LATER = "later"


LAYOUTS = {"tensorrt_llm": {}, LATER: {"decoupled": False, "renamed": True}}
"""Of each model, how it differs from that of v0.19."""


@pytest.fixture(scope="module")
def triton(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    """Each model has room for two adapters, and leaves the last request's tensors in its log."""
    path = tmp_path_factory.mktemp("nvidia")
    for name, layout in LAYOUTS.items():
        folder = path / "models" / name
        (folder / "1").mkdir(parents=True)
        shutil.copy(ROOT / "tests/server/standin/model.py", folder / "1")
        values = {"gpt_model_path": str(world.model), "capacity": "2", "log": str(path / f"{name}.log")}
        (folder / "config.pbtxt").write_text(config(name, values, **layout), encoding="utf-8")
    # NVIDIA's model does not report when it is idle.
    with served(path / "models", "--drain-timeout", "2") as server:
        yield server


@contextmanager
def in_front_of(triton: Triton, world: World, model: str, path: Path) -> Iterator[tuple[Running, Path]]:
    """The OpenAI server, and the model's log."""
    running = Running(**world.gateway(triton.grpc, path / "named"), triton_model=model)
    try:
        yield running, triton.repo.with_name(f"{model}.log")
    finally:
        running.close()


@pytest.fixture(scope="module")
def gateway(
    triton: Triton, world: World, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Running, Path]]:
    with in_front_of(triton, world, "tensorrt_llm", tmp_path_factory.mktemp("gateway")) as found:
        yield found


def ask(gateway: Running, task_id: int | None, prompt: str = "Hello", **body: Any) -> str:
    model = f"adapter-{task_id}" if task_id else "base"
    answer = gateway.post(
        model=model, prompt=prompt, temperature=0, max_tokens=NEW, **{"ignore_eos": True, **body}
    )
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def expected(world: World, task_id: int | None, prompt: str = "Hello") -> str:
    tokenizer = Tokenizer(world.model)
    adapter = world.adapters[task_id] if task_id else None
    return tokenizer.decode(reference_generate(world.model, adapter, tokenizer.encode(prompt), NEW))


def test_adapters_that_were_evicted_are_sent_again(gateway: tuple[Running, Path], world: World) -> None:
    """Four adapters in turns, with room for two: each comes back without the client's knowing."""
    running, log = gateway
    sent = []
    for task_id in (None, 1, 1, 2, 3, 4, 1, 1):
        assert ask(running, task_id) == expected(world, task_id), task_id
        sent.append(json.loads(log.read_text(encoding="utf-8")))
    assert "lora_task_id" not in sent[0]
    assert sent[1]["lora_weights"][0] == "float16" and sent[1]["lora_config"][1][-1] == 3
    assert sent[1]["lora_task_id"] == ["uint64", [1, 1]] or sent[1]["lora_task_id"] == ["uint64", [1]]
    assert "lora_weights" not in sent[2]
    assert "lora_weights" in sent[6] and "lora_weights" not in sent[7]


def test_streams_ends_and_samples(gateway: tuple[Running, Path], world: World) -> None:
    running, _ = gateway
    client = running.client()
    body: dict[str, Any] = {"model": "adapter-2", "prompt": "Hello", "temperature": 0, "max_tokens": NEW}
    chunks = list(client.completions.create(**body, stream=True, extra_body={"ignore_eos": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected(world, 2)
    assert len(chunks) > 2 and chunks[-1].choices[0].finish_reason == "length"
    words = expected(world, 2)
    stopped = client.completions.create(**body, stop=[words[3]], extra_body={"ignore_eos": True}).choices[0]
    assert stopped.text == words[: words.index(words[3])] and stopped.finish_reason == "stop"
    several = client.completions.create(
        **{**body, "temperature": 2.0}, n=3, seed=4, extra_body={"ignore_eos": True}
    )
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert len({choice.text for choice in several.choices}) > 1
    # The end id that such a server leaves in the output is not counted, and is the reason of the end.
    tokenizer = Tokenizer(world.model)
    bias = {str(tokenizer.eos_id): 100}
    ended = client.completions.create(**body, logit_bias=bias)
    assert (ended.choices[0].text, ended.choices[0].finish_reason) == ("", "stop")
    assert ended.usage is not None and ended.usage.completion_tokens == 0


def test_what_it_does_not_have_is_refused_by_name(gateway: tuple[Running, Path], world: World) -> None:
    running, _ = gateway
    # An older model has no prompt_ignore_length: there the penalties count the prompt too.
    case = {"presence_penalty": -2.0, "frequency_penalty": -2.0}
    ids = Tokenizer(world.model).encode("Hello")
    truth = most_probable(tensorrt_llm, world.model, None, ids, NEW, **case)
    assert ask(running, None, **case) == Tokenizer(world.model).decode(truth)
    refused = running.post(model="base", prompt="a", min_p=0.2)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_field")
    assert "min_p" in refused.json()["error"]["message"]
    grammar = {"type": "lark_grammar", "lark_grammar": 'start: "a"'}
    refused = running.post(model="base", prompt="a", response_format=grammar)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_format")


def test_without_decoupling_and_with_later_names(triton: Triton, world: World, tmp_path: Path) -> None:
    with in_front_of(triton, world, LATER, tmp_path) as (running, log):
        assert ask(running, 3, seed=7) == expected(world, 3)
        told = json.loads(log.read_text(encoding="utf-8"))
        assert "seed" in told and "random_seed" not in told
        stream = running.client().completions.create(
            model="adapter-3", prompt="Hello", temperature=0, max_tokens=NEW, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        assert "".join(chunk.choices[0].text for chunk in stream) == expected(world, 3)
        case = {"presence_penalty": -2.0, "frequency_penalty": -2.0}
        ids = Tokenizer(world.model).encode("Hello")
        truth = most_probable(vllm, world.model, None, ids, NEW, **case)
        assert ask(running, None, **case) == Tokenizer(world.model).decode(truth)
        refused = running.post(model="base", prompt="a", n=2)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
