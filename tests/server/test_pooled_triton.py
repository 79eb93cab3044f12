"""Protects pooled outputs, mixes and activated LoRA through every model of one real server: each acts as
transformers + PEFT do, beside generation, or refuses in one sentence that names what it does not take."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from pooled_adapters import hidden, logits, near
from servers import INVOKE, Named, Running, World
from test_other_models import expected, stream, vllm
from test_server import ask, inputs, new_ids
from tiny_models import reference_generate

from manylora.generation.tokenizer import Tokenizer

NEW = 6
TEXT = {"text_input": "Hello", "max_tokens": NEW, "end_id": -1, "exclude_input_in_output": True}
LLMAPI = {"text_input": "Hello", "sampling_param_max_tokens": NEW,
          "sampling_param_exclude_input_from_output": True}  # fmt: skip


@pytest.fixture(scope="module")
def server(contracts: Running) -> Running:
    return contracts


def by_name(name: str | None) -> dict[str, np.ndarray]:
    return {} if name is None else {"lora_name": np.array([[name.encode()]], np.object_)}


def pooled(
    server: Running, prompt: list[int], name: str | None = None, mode: str = "last", head: bool = False
) -> np.ndarray:
    """Over gRPC."""
    wanted = {"pooling": np.array([[mode.encode()]], np.object_), "classification_head": np.array([[head]])}
    [found] = ask(server, inputs(prompt, 1, **wanted, **by_name(name)))
    return found.as_numpy("pooled_output")[0]


def test_embeddings_labels_scores_and_text_at_once(server: Running, world: World, named: Named) -> None:
    prompts = [[(7 * i + j) % 250 for j in range(3 + 5 * i)] for i in range(12)]

    def one(number: int) -> np.ndarray | str:
        kinds = (
            lambda ids: pooled(server, ids)[0],
            lambda ids: pooled(server, ids, "labels", head=True)[0],
            lambda ids: pooled(server, ids, "score", head=True)[0],
            lambda ids: vllm(server, name="one")["text_output"],
        )
        return kinds[number % 4](prompts[number])  # type: ignore[no-any-return,no-untyped-call]

    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(one, range(12)))
    text = expected(world, named.catalog / "one")
    for number, (ids, answer) in enumerate(zip(prompts, found, strict=True)):
        if number % 4 == 3:
            assert answer == text
            continue
        right = (
            hidden(world.model, ids)[-1], logits(named.labels, ids), logits(named.score, ids)
        )[number % 4]  # fmt: skip
        assert near(answer, right), number


def test_pooled_outputs_over_http(server: Running, world: World, named: Named) -> None:
    prompt = [72, 101, 108, 108, 111]
    body = {"input_ids": prompt, "input_lengths": len(prompt), "request_output_len": 1, "pooling": "last"}
    status, told = server.post("tensorrt_llm/generate", **body, classification_head=True, lora_name="labels")
    assert status == 200, told
    assert near(np.array(json.loads(told)["pooled_output"], np.float32), logits(named.labels, prompt))
    assert near(pooled(server, prompt, mode="all"), hidden(world.model, prompt))


def test_embeddings_of_vllms_model(server: Running, world: World) -> None:
    """Over HTTP and gRPC, of the base model and an adapter: of length 1."""
    ids = Tokenizer(world.model).encode("Hello")

    def right(name: str | None) -> np.ndarray:
        values = pooled(server, ids, name)[0]
        return values / np.linalg.norm(values)  # type: ignore[no-any-return]

    states = hidden(world.model, ids)[-1]
    assert near(right(None), states / np.linalg.norm(states))
    request = json.dumps({"input": "Hello", "pooling_params": {}})
    for name in (None, "one", "two"):
        more = {} if name is None else {"lora_name": name}
        status, told = server.post("vllm_model/generate", embedding_request=request, **more)
        assert status == 200, told
        found = np.array(json.loads(json.loads(told)["text_output"]), np.float32)
        assert near(found, right(name))
    assert not near(right("one"), right("two"))
    sent = {"embedding_request": np.array([json.dumps({"input": ids}).encode()], np.object_)}
    answers = stream(server, "vllm_model", sent | {"return_num_input_tokens": np.array([True])})
    assert near(np.array(json.loads(answers[0].as_numpy("text_output")[0]), np.float32), right(None))
    assert answers[0].as_numpy("num_input_tokens").tolist() == [len(ids)]
    status, told = server.post("vllm_model/generate", embedding_request=request, lora_name="nobody")
    assert status != 200 and "nobody" in told


def test_mixes_act_through_every_text_model(server: Running, world: World, named: Named) -> None:
    """One adapter of scale 1 is that adapter; two are what `tensorrt_llm` computes, which is compared with
    PEFT elsewhere."""
    ids, tokenizer = Tokenizer(world.model).encode("Hello"), Tokenizer(world.model)
    mix = {"lora_mix_names": ["one", "two"], "lora_mix_scales": [0.5, -1.25]}
    names, scales = np.array([[b"one", b"two"]], np.object_), np.array([[0.5, -1.25]], np.float32)
    asked = ask(server, inputs(ids, NEW, lora_mix_names=names, lora_mix_scales=scales))
    both = tokenizer.decode(new_ids(asked)[len(ids) :])
    alone = expected(world, named.catalog / "one")
    assert len({both, alone, expected(world, None)}) == 3
    for model in ("tensorrt_llm_bls", "ensemble"):
        for more, right in ((mix, both), ({"lora_mix_names": ["one"], "lora_mix_scales": [1.0]}, alone)):
            status, told = server.post(f"{model}/generate", **TEXT, **more)
            assert status == 200, told
            assert json.loads(told)["text_output"] == right, model
        status, told = server.post(f"{model}/generate", **TEXT, **mix, lora_name="one")
        assert status != 200 and "stands alone" in told
    sampling = json.dumps({**mix, "temperature": 0, "max_tokens": NEW})
    status, told = server.post("vllm_model/generate", text_input="Hello", sampling_parameters=sampling)
    assert status == 200 and json.loads(told)["text_output"] == "Hello" + both, told
    status, told = server.post("llmapi/generate", **LLMAPI, **mix)
    assert status == 200 and json.loads(told)["text_output"] == both, told
    greedy = {"text_input": "Hello", "temperature": 0, "max_tokens": NEW}  # parameters are read, too
    status, told = server.post("vllm_model/generate", **greedy, lora_mix_names="one")
    assert status == 200 and json.loads(told)["text_output"] == "Hello" + alone, told
    status, told = server.post("vllm_model/generate", **greedy, lora_mix_scales=0.5)
    assert status != 200 and "lora_mix_scales" in json.loads(told)["error"]


def test_activated_lora_by_its_name_through_every_model(server: Running, world: World, named: Named) -> None:
    """Its invocation tokens are in the text, or it does not act."""
    tokenizer = Tokenizer(world.model)
    for text, folder in (("Hello " + INVOKE + "!", named.catalog / "activated"), ("Hello!", None)):
        right = tokenizer.decode(reference_generate(world.model, folder, tokenizer.encode(text), NEW))
        for model in ("tensorrt_llm_bls", "ensemble"):
            status, told = server.post(
                f"{model}/generate", **TEXT | {"text_input": text}, lora_name="activated"
            )
            assert status == 200, told
            assert json.loads(told)["text_output"] == right, (model, text)
        assert vllm(server, name="activated", text_input=text)["text_output"] == right
        status, told = server.post("llmapi/generate", **LLMAPI | {"text_input": text}, lora_name="activated")
        assert status == 200, told
        found = json.loads(told)["text_output"]  # it ends at the end token
        assert found and right.startswith(found)
