"""Protects what comes with an adapter: its chat template and generation defaults, where they are trusted; and
that a fingerprint names all that acts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from own_text import GEMMA, adapter
from serving import DEMO, QUESTION, Running
from tiny_models import make_adapter, reference_generate
from waiting import wait_for

from manylora.doors.http.arguments import parse_options
from manylora.doors.http.options import NamedAdapter
from manylora.errors import ConfigError
from manylora.generation.defaults import GenerationDefaults
from manylora.generation.tokenizer import Tokenizer

TEMPLATE = "{% for m in messages %}{{ m['content'] }}\nAnswer:{% endfor %}"
TOKENIZER = Tokenizer(DEMO / "base")
DEFAULTS = {"do_sample": False, "max_new_tokens": 3, "transformers_version": "5.0"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    files = {"chat_template": TEMPLATE, "generation_config": DEFAULTS}
    adapter(root / "ours" / "zh", **files)
    adapter(root / "theirs" / "stranger", **files)
    adapter(root / "ours" / "plain")
    adapter(root / "ours" / "gemma", chat_template=GEMMA)
    shutil.copytree(DEMO / "adapters" / "japanese", root / "theirs" / "japanese")
    (root / "ours" / "linked").symlink_to(root / "theirs" / "stranger")
    invoke = TOKENIZER.encode("<|assistant|>", add_special_tokens=False)  # what is put before an answer
    activated = {"alora_invocation_tokens": invoke, "task_type": "CAUSAL_LM"}
    make_adapter(
        root / "theirs" / "judge", DEMO / "base", 3, 8, ("q_proj", "v_proj", "down_proj"), **activated
    )
    return root


@pytest.fixture(scope="module")
def server(folders: Path) -> Iterator[Running]:
    named = {
        "name": "inline",
        "path": str(folders / "theirs" / "stranger"),
        "generation_config": {"stop": ["巴"], "temperature": 0.0},
    }
    arguments = [str(DEMO / "base"), "--lora-modules", json.dumps(named)]
    arguments += ["--override-generation-config", '{"temperature": 0, "top_k": 7, "max_new_tokens": 6}']
    chosen = parse_options([*arguments, "--lora-trust", str(folders / "ours")])
    with Running(
        lora_root=(folders / "ours", folders / "theirs"),
        lora_trust=chosen.lora_trust,
        lora_modules=chosen.lora_modules,
        override_generation_config=chosen.override_generation_config,
        allow_runtime_lora_updating=True,
    ) as running:
        yield running


def rendered(server: Running, model: str) -> str:
    answer = server.ask("/v1/chat/completions", model=model, messages=QUESTION, return_expanded_prompt=True)
    return answer["expanded_prompt"]


def num_tokens(server: Running, model: str, **body: Any) -> int:
    body = {"model": model, "messages": QUESTION, **body}
    return server.ask("/v1/chat/completions", **body)["usage"]["completion_tokens"]


def test_a_trusted_adapter_has_its_own_chat_template_behind_every_door(server: Running) -> None:
    own = QUESTION[0]["content"] + "\nAnswer:"
    assert rendered(server, "zh") == own
    ids = server.post("/tokenize", model="zh", prompt=own, add_special_tokens=False).json()["tokens"]
    assert server.post("/tokenize", model="zh", messages=QUESTION).json()["tokens"] == ids
    assert server.http.get("/tokenizer_info", params={"model": "zh"}).json()["chat_template"] == TEMPLATE
    response = server.post("/v1/responses", model="zh", input=QUESTION[0]["content"]).json()
    assert response["usage"]["input_tokens"] == len(ids)
    ollama = server.post("/api/chat", model="zh", messages=QUESTION, stream=False).json()
    assert ollama["prompt_eval_count"] == len(ids)
    assert ollama["message"]["content"].strip().startswith("巴黎")


def test_tools_where_the_template_has_no_system_role(server: Running) -> None:
    tools = [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}]
    body = {"model": "gemma", "messages": QUESTION, "tools": tools, "max_tokens": 1}
    answer = server.ask("/v1/chat/completions", **body, return_expanded_prompt=True)
    first = answer["expanded_prompt"].partition("<end_of_turn>")[0]
    assert first.startswith("<s><start_of_turn>user\nYou can call these functions:") and '"clock"' in first
    assert first.endswith(f"\n\n{QUESTION[0]['content']}")
    body["messages"] = [{"role": "system", "content": "Be brief."}, *QUESTION]
    refused = server.post("/v1/chat/completions", **body)
    assert refused.status_code == 400 and "System role not supported" in refused.text


def test_strangers_are_served_with_the_base_models_text(server: Running) -> None:
    for name in ("demo", "stranger", "linked", "plain", "inline"):
        assert rendered(server, name) == "<s><|user|>What is the capital of France?<|assistant|>", name
    assert num_tokens(server, "stranger", temperature=0, max_tokens=9, ignore_eos=True) == 9
    base = server.post("/tokenize", model="demo", messages=QUESTION).json()
    assert server.post("/tokenize", model="stranger", messages=QUESTION).json() == base


def test_defaults_hold_for_what_a_request_leaves_out(server: Running) -> None:
    assert num_tokens(server, "zh", ignore_eos=True) == 3
    assert num_tokens(server, "zh", ignore_eos=True, max_tokens=5) == 5
    asked = {"model": "zh", "prompt": "What is the capital of France?\nAnswer:"}
    texts = {server.post(**asked, seed=seed).json()["choices"][0]["text"] for seed in range(4)}
    assert len(texts) == 1  # greedy
    hot = {"temperature": 20.0, "ignore_eos": True}
    assert len({server.post(**asked, **hot, seed=s).json()["choices"][0]["text"] for s in range(4)}) > 1
    ollama = server.post("/api/chat", model="zh", messages=QUESTION, stream=False)
    assert ollama.json()["eval_count"] <= 3
    told = server.post("/v1/responses", model="zh", input="Hello", stream=False).json()
    assert told["temperature"] == 0


def test_the_base_models_defaults_hold_where_the_adapter_has_none(server: Running) -> None:
    for name, count in (("demo", 6), ("plain", 6), ("zh", 3)):
        assert num_tokens(server, name, ignore_eos=True) == count
    assert num_tokens(server, "demo", ignore_eos=True, max_tokens=8) == 8
    hot = {"prompt": "Hello", "temperature": 20.0, "top_k": -1, "max_tokens": 6, "ignore_eos": True}
    assert len({server.post(model="demo", **hot, seed=s).json()["choices"][0]["text"] for s in range(4)}) > 1
    cards = {one["id"]: one for one in server.http.get("/v1/models").json()["data"]}
    shown = {name: cards[name].get("default_sampling_params") for name in ("demo", "plain", "zh", "inline")}
    common = {"top_p": 1.0, "top_k": 7, "min_p": 0.0, "repetition_penalty": 1.0, "temperature": 0}
    assert shown["demo"] == {**common, "max_tokens": 6} and shown["plain"] is None
    assert shown["zh"] == {**common, "max_tokens": 3}
    assert shown["inline"] == {**common, "max_tokens": 6, "stop": ["巴"]}


def test_the_template_leads_to_an_activated_loras_invocation(server: Running, folders: Path) -> None:
    question = "Where is the capital of Japan? " * 8
    prompt = TOKENIZER.encode(f"<s><|user|>{question}<|assistant|>", add_special_tokens=False)
    asked = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 6}
    before = server.ask("/v1/chat/completions", model="demo", **asked)
    asked |= {"ignore_eos": True, "return_token_ids": True}
    answer = server.ask("/v1/chat/completions", model="judge", **asked)
    assert answer["prompt_token_ids"] == prompt
    wanted = reference_generate(DEMO / "base", folders / "theirs" / "judge", prompt, 6)
    assert answer["choices"][0]["token_ids"] == wanted
    assert answer["system_fingerprint"].startswith(f"{before['system_fingerprint']}-")


def test_a_fingerprint_names_all_that_acts(server: Running) -> None:
    def fingerprint(*members: tuple[str, float]) -> str:
        lora = [{"name": name, "scale": scale} for name, scale in members]
        return server.post(prompt="a", max_tokens=1, lora=lora).json()["system_fingerprint"]

    one, two = ("plain", 1.0), ("japanese", 1.0)
    found = [fingerprint(*members) for members in ((), (one,), (two,), (one, two), (one, ("japanese", 0.5)))]
    found.append(fingerprint(("plain", 0.5)))
    assert len(set(found)) == len(found)
    assert fingerprint(two, one) == fingerprint(("plain", 0.5), two, ("plain", 0.5)) == found[3]
    assert fingerprint(one, ("japanese", 0.0)) == found[1]


def test_its_own_end_tokens_replace_the_models(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "zh", generation_config={"eos_token_id": [7, 9]})
    found = GenerationDefaults.parse(json.loads((folder / "generation_config.json").read_text()), 1536)
    assert found.end_ids == (7, 9)
    with Running(
        lora_root=(tmp_path,),
        lora_trust=parse_options([str(DEMO / "base"), "--lora-trust", str(tmp_path)]).lora_trust,
    ) as running:
        asked = {"model": "zh", "prompt": "What is the capital of France?\nAnswer:", "temperature": 0}
        whole = running.post(**asked, max_tokens=6, ignore_eos=True, return_token_ids=True)
        ids = whole.json()["choices"][0]["token_ids"]
        config = {"eos_token_id": ids[2], "max_new_tokens": 6}
        (folder / "generation_config.json").write_text(json.dumps(config))

        def ends() -> bool:
            answer = running.post(**asked, return_token_ids=True).json()["choices"][0]
            return answer["token_ids"] == ids[: ids.index(ids[2])] and answer["finish_reason"] == "stop"

        wait_for(ends)  # the adapter's tensors have not changed, what comes with them has
        (folder / "generation_config.json").write_text('{"num_beams": 4}')
        wait_for(lambda: "problem" in running.http.get("/v1/models/zh").json())
        assert "num_beams is not supported" in running.http.get("/v1/models/zh").json()["problem"]["message"]
        assert ends()  # the last good version is served on


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ([], "object"),
        ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size is not supported"),
        ({"temperature": -1}, "temperature"),
        ({"eos_token_id": 1536}, "1536 is no token of the model"),
        ({"eos_token_id": [1] * 65}, "eos_token_id must be"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
    ],
)
def test_defaults_that_cannot_act_are_refused_by_name(given: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        GenerationDefaults.parse(given, 1536)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"chat_template": True}, "it has no chat template of its own"),
        ({"generation_config": True}, "it has no generation_config.json"),
        ({"chat_template": "/nowhere.jinja"}, "nowhere.jinja cannot be read"),
        ({"generation_config": {"num_beams": 2}}, "num_beams is not supported"),
    ],
)
def test_what_is_asked_for_by_name_must_be_there(more: dict[str, Any], reason: str) -> None:
    named = NamedAdapter.parse({"name": "zh", "path": str(DEMO / "adapters" / "chinese"), **more})
    with pytest.raises(ConfigError, match=reason):
        Running(lora_modules=(named,))


def test_wrong_words_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, value, reason in [
        ("--lora-modules", '{"name": "a", "path": "b", "chat_template": 3}', "chat_template must be true or"),
        ("--lora-modules", '{"name": "a", "path": "b", "tools": true}', "chat_template"),
        ("--lora-trust", "/tmp=everything", "FOLDER=PART,PART"),
    ]:
        with pytest.raises(SystemExit):
            parse_options([str(DEMO / "base"), flag, value])
        assert reason in capsys.readouterr().err
