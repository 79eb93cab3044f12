"""Protects what comes with an adapter in a real Triton: its tokenizer, ends and defaults through each
model of text, for adapters of trusted folders alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from own_text import LAST, adapter, shortened, with_token
from servers import Running, fill_repo, served
from serving import DEMO

from manylora.generation.tokenizer import Tokenizer

PROMPT = "What is the capital of France?\nAnswer:"
TOKEN = "<|sql|>"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that leaves one id free."""
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "tokenizer.json").write_text(json.dumps(shortened()))
    settings = (DEMO / "base" / "tokenizer_config.json").read_text()
    (folder / "tokenizer_config.json").write_text(settings)
    return folder


@pytest.fixture(scope="module")
def server(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path = tmp_path_factory.mktemp("own-text")
    own = with_token(shortened(), TOKEN)
    end = Tokenizer(base).encode("黎", False)
    assert len(end) == 1
    ends = {"eos_token_id": end, "do_sample": False}
    adapter(path / "ours" / "sql", tokenizer=own)
    word = json.loads(json.dumps(own))
    word["added_tokens"][-1]["special"] = False
    adapter(path / "ours" / "word", tokenizer=word)
    adapter(path / "ours" / "ends", generation_config=ends)
    adapter(path / "ours" / "stops", generation_config={"stop_strings": ["巴黎"], "temperature": 0})
    adapter(path / "ours" / "hot", generation_config={"temperature": 20.0})
    adapter(path / "prefetch" / "7", tokenizer=own, generation_config=ends)
    adapter(path / "theirs" / "stranger", tokenizer=own, generation_config=ends)
    (path / "ours" / "linked").symlink_to(path / "theirs" / "stranger")
    repo = fill_repo(
        path / "models",
        DEMO / "base",
        contracts=True,
        tokenizer_dir=str(base),
        lora_catalog_dir=str(path / "ours"),
        lora_allowed_path=str(path / "theirs"),
        lora_prefetch_dir=str(path / "prefetch"),
        lora_trust=f"{path / 'ours'};{path / 'prefetch'}",
    )
    text = (repo / "postprocessing" / "config.pbtxt").read_text()
    text = text.replace(f'"{DEMO / "base"}"', f'"{base}"')
    (repo / "postprocessing" / "config.pbtxt").write_text(text)
    with served(repo) as running:
        yield running


def ask(server: Running, model: str, prompt: str, **more: Any) -> str:
    """The text of an answer; streamed, where `stream` is asked for."""
    if model == "vllm_model":
        given = {"max_tokens": 6, "temperature": 0, **more.pop("sampling", {})}
        given["lora_name"] = more.pop("lora_name")
        body = {
            "text_input": prompt,
            "exclude_input_in_output": True,
            "sampling_parameters": json.dumps(given),
        }
    elif model == "llmapi":
        body = {"text_input": prompt, "sampling_param_exclude_input_from_output": True, **more}
        body["sampling_param_max_tokens"] = 6
    else:
        body = {"text_input": prompt, "max_tokens": 6, "exclude_input_in_output": True, **more}
    if body.pop("stream", False):
        return "".join(one.get("text_output", "") for one in server.stream(model, **body))
    status, told = server.post(f"{model}/generate", **body)
    assert status == 200, told
    return json.loads(told)["text_output"]


CHAIN = ("ensemble", "tensorrt_llm_bls")


@pytest.mark.parametrize("model", CHAIN)
@pytest.mark.parametrize("stream", [False, True])
def test_the_tokens_that_it_added_are_read_and_written(server: Running, model: str, stream: bool) -> None:
    forced = {"embedding_bias_words": [TOKEN], "embedding_bias_weights": [1e4], "end_id": -1}
    assert ask(server, model, f"{TOKEN}!", lora_name="word", stream=stream, **forced) == 6 * TOKEN
    assert ask(server, model, f"{TOKEN}!", lora_name="sql", stream=stream, **forced) == ""  # a special one
    assert TOKEN not in ask(server, model, f"{TOKEN}!", lora_name="linked", stream=stream, **forced)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", CHAIN)
def test_what_ends_an_answer_acts_where_it_is_trusted(server: Running, model: str, stream: bool) -> None:
    plain = ask(server, model, PROMPT, stream=stream)
    assert "巴" not in plain
    assert ask(server, model, PROMPT, lora_name="ends", stream=stream) == "巴"
    assert ask(server, model, PROMPT, lora_task_id=7, stream=stream) == "巴"
    assert ask(server, model, PROMPT, lora_name="linked", stream=stream).startswith("巴黎")
    assert ask(server, model, PROMPT, lora_name="ends", end_id=2, stream=stream).startswith("巴黎")
    stopped = ask(server, model, PROMPT, lora_name="stops", end_id=-1, stream=stream)
    assert stopped == "巴黎"  # a stop word stays in Triton's answers
    longer = ask(server, model, PROMPT, lora_name="stops", end_id=-1, stop_words=["never"], stream=stream)
    assert len(longer) > 2


@pytest.mark.parametrize("model", CHAIN)
def test_its_defaults_are_drawn_with(server: Running, model: str) -> None:
    texts = {ask(server, model, PROMPT, lora_name="hot", random_seed=seed) for seed in range(4)}
    assert len(texts) > 1
    cold = {ask(server, model, PROMPT, lora_name="hot", random_seed=s, temperature=0.0) for s in range(3)}
    assert len(cold) == 1


def test_the_models_of_other_projects_use_them_too(server: Running) -> None:
    for model in ("vllm_model", "llmapi"):
        assert ask(server, model, PROMPT, lora_name="ends") == "巴", model
        assert ask(server, model, PROMPT, lora_name="linked").startswith("巴黎"), model
        assert ask(server, model, PROMPT, lora_name="stops") == "", model
    given = {"allowed_token_ids": [LAST], "max_tokens": 2, "skip_special_tokens": False, "ignore_eos": True}
    assert ask(server, "vllm_model", PROMPT, lora_name="sql", sampling=given) == 2 * TOKEN
    assert TOKEN not in ask(server, "vllm_model", PROMPT, lora_name="linked", sampling=given)
    assert len(ask(server, "llmapi", PROMPT, lora_id=7)) == 1


def test_preprocessing_says_what_it_made(server: Running) -> None:
    def ids(**more: Any) -> list[int]:
        request = {"QUERY": f"a{TOKEN}", "REQUEST_OUTPUT_LEN": 4, **more}
        status, told = server.post("preprocessing/generate", **request)
        assert status == 200, told
        return json.loads(told)["INPUT_ID"]

    assert ids(LORA_NAME="sql")[-1] == ids(LORA_TASK_ID=7)[-1] == LAST
    for other in ({}, {"LORA_NAME": "linked"}, {"LORA_NAME": "nobody"}, {"LORA_TASK_ID": 9}):
        assert LAST not in ids(**other)
