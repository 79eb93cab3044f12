"""Wrong answers that users of other servers reported, each as a test for any OpenAI-compatible server.

A test has the project and the number of the report in its name. Every expected answer is transformers +
PEFT's. docs/conformance.md says how to run them against a server, and has results.
"""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest
from conformance_server import Server

NOISE = 0.05  # nats; float32 servers differ by less than 0.001, with a float16 KV cache by 0.02
SLOTS = 20  # adapters loaded and unloaded in turn: more than a server keeps by default


@pytest.mark.parametrize("adapter", ["attention", "linear", "rslora", "rank-pattern"])
def test_vllm_10798_answers_are_pefts(server: Server, adapter: str) -> None:
    assert server.answers_or_refusal(adapter) == server.expected.texts(adapter)


def test_vllm_10849_dora(server: Server) -> None:
    assert server.answers_or_refusal("dora") == server.expected.texts("dora")


@pytest.mark.parametrize("adapter", ["", "attention", "linear"])
def test_tinker_cookbook_928_log_probs_are_the_adapters(server: Server, adapter: str) -> None:
    name = server.load(adapter) if adapter else ""
    for prompt, expected in zip(server.expected.prompts, server.expected.log_probs(adapter), strict=True):
        assert server.log_probs(name, prompt) == pytest.approx(expected[:12], abs=NOISE)


@pytest.mark.parametrize("adapter", ["head", "saved-head"])
def test_vllm_12075_a_head_is_used_or_refused(server: Server, adapter: str) -> None:
    assert server.answers_or_refusal(adapter) in (None, server.expected.texts(adapter))


def test_vllm_34186_an_adapter_of_the_embedding_is_used_or_refused(server: Server) -> None:
    assert server.answers_or_refusal("embedding") in (None, server.expected.texts("embedding"))


@pytest.mark.parametrize("adapter", ["foreign", "foreign-in-part"])
def test_sglang_31522_tensors_without_a_module_are_refused(server: Server, adapter: str) -> None:
    assert server.answers_or_refusal(adapter) is None


@pytest.mark.parametrize("adapter", ["hybrid", "hybrid-linear"])
def test_vllm_49354_adapters_act_on_linear_attention(hybrid: Server, adapter: str) -> None:
    assert hybrid.texts() == hybrid.expected.texts()
    assert hybrid.answers_or_refusal(adapter) == hybrid.expected.texts(adapter)


def test_vllm_42125_a_reloaded_name_does_not_use_the_old_prefix(server: Server, replaceable: Path) -> None:
    """The files of a path are replaced between the loads."""
    name = server.load(replaceable)
    assert server.texts(name) == server.expected.texts("attention")
    server.unload(name)
    shutil.rmtree(replaceable)
    shutil.copytree(server.adapters / "linear", replaceable)
    assert server.texts(server.load(replaceable, name)) == server.expected.texts("linear")


def test_vllm_30931_a_name_with_another_path_does_not_use_the_old_prefix(server: Server) -> None:
    name = server.load("attention")
    assert server.texts(name) == server.expected.texts("attention")
    server.unload(name)
    assert server.texts(server.load("rslora", name)) == server.expected.texts("rslora")


def test_vllm_54839_unloading_frees_the_slot(server: Server) -> None:
    for i in range(SLOTS):
        adapter = ("attention", "linear", "rslora")[i % 3]
        name = server.load(adapter)
        assert server.text(name, server.expected.prompts[0]) == server.expected.texts(adapter)[0]
        server.unload(name)


def test_vllm_47724_an_answer_stays_its_adapters_while_the_name_is_replaced(server: Server) -> None:
    name, expected = server.load("long"), server.expected.texts("long")[0]
    body = {
        "model": name, "prompt": server.expected.prompts[0], "max_tokens": len(expected), "temperature": 0,
        "ignore_eos": True, "stream": True,
    }  # fmt: skip
    text, replaced = "", False
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
            if not replaced:
                replaced = True
                server.load("linear", name, replace=True)
    assert text == expected


def test_lmcache_2961_a_prefix_belongs_to_its_adapter(server: Server) -> None:
    """The same prompts of one adapter after the other, and of the base model between."""
    names = {adapter: server.load(adapter) for adapter in ("attention", "linear")}
    for adapter in ("", "attention", "linear", "", "linear", "attention", ""):
        assert server.texts(names.get(adapter, "")) == server.expected.texts(adapter)


def test_llama_cpp_26207_a_conversation_may_change_its_adapter(server: Server) -> None:
    """A prompt whose beginning was computed, and continued, with another adapter or with none."""
    name = server.load("attention")
    for i, prompt in enumerate(server.expected.prompts):
        server.complete("", prompt[:-4], 4)
        assert (
            server.complete(name, prompt, 12)["choices"][0]["text"] == server.expected.texts("attention")[i]
        )
        server.complete(name, prompt[:-2], 2)
        assert server.complete("", prompt, 12)["choices"][0]["text"] == server.expected.texts()[i]


def test_openvino_genai_3798_each_request_of_a_batch_has_its_own_adapter(server: Server) -> None:
    adapters = ["attention", "", "linear", "rslora", "", "rank-pattern"] * 2
    names = {adapter: server.load(adapter) if adapter else "" for adapter in adapters}
    with ThreadPoolExecutor(len(adapters)) as pool:
        answers = list(pool.map(lambda adapter: server.texts(names[adapter]), adapters))
    assert answers == [server.expected.texts(adapter) for adapter in adapters]


def test_sglang_36894_unloading_works_after_several_choices(server: Server) -> None:
    name = server.load("linear")
    sampled = {"n": 3, "temperature": 1.0, "seed": 1}
    assert len(server.complete(name, server.expected.prompts[0], 12, **sampled)["choices"]) == 3
    server.unload(name)
    with pytest.raises(httpx2.HTTPStatusError):
        server.complete(name, server.expected.prompts[0], 1)
    assert server.texts(server.load("attention", name)) == server.expected.texts("attention")


@pytest.fixture
def replaceable(server: Server) -> Path:
    """A copy of the adapter `attention` that the test may change."""
    made = server.adapters / "replaceable"
    shutil.rmtree(made, ignore_errors=True)
    shutil.copytree(server.adapters / "attention", made)
    return made
