"""Protects what comes with an adapter in the Python API: names, chats, defaults, tokenizers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from own_text import GEMMA, LAST, adapter, shortened, with_token
from serving import DEMO

from manylora import LLM, LoraConfig, LoRARequest, SamplingParams
from manylora.errors import AdapterInvalidError, AdapterNotFoundError, ConfigError
from manylora.generation.tokenizer import Tokenizer
from manylora.lora.catalog import files

TEMPLATE = "{% for m in messages %}{{ m['content'] }}\nAnswer:{% endfor %}{{ more }}"
QUESTION = "What is the capital of France?"
CHAT = [{"role": "user", "content": QUESTION}]
GREEDY = SamplingParams(max_tokens=4)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    spec, settings = shortened(), (DEMO / "base" / "tokenizer_config.json").read_text()
    (root / "base").mkdir()
    (root / "base" / "tokenizer.json").write_text(json.dumps(spec))
    (root / "base" / "tokenizer_config.json").write_text(settings)
    own = with_token(spec, "<|sql|>")
    files = {"chat_template": TEMPLATE, "generation_config": {"max_new_tokens": 3, "stop_strings": ["巴"]}}
    adapter(root / "ours" / "team" / "zh", **files, tokenizer=own)
    adapter(root / "theirs" / "zh", **files, tokenizer=own)
    adapter(root / "ours" / "bad", generation_config={"num_beams": 4})
    adapter(root / "ours" / "plain")
    return root


@pytest.fixture(scope="module")
def llm(root: Path) -> Iterator[LLM]:
    with LLM(
        DEMO / "base",
        tokenizer=root / "base",
        lora_config=LoraConfig(max_lora_rank=16, max_loras=4),
        lora_root=[root / "ours", root / "theirs"],
        lora_trust=str(root / "ours"),
        lora_alias={"chinese": "team/zh"},
        device="cpu",
    ) as made:
        yield made


def test_a_name_is_the_adapter_below_the_root(llm: LLM, root: Path) -> None:
    assert llm.lora_names() == ["bad", "chinese", "plain", "team/zh", "zh"]
    path = LoRARequest("by path", 7, str(root / "ours" / "plain"))
    prompts = [f"{QUESTION}\nAnswer:"] * 4
    outputs = llm.generate(prompts, GREEDY, lora_request=[path, "plain", ("plain", 1), None])
    texts = [one.outputs[0].text for one in outputs]
    assert texts[0] == texts[1] == texts[2] != texts[3]
    pairs = [("plain", 0.5), ("zh", 0.5)]
    assert llm.generate(prompts[0], GREEDY, pairs).outputs[0].text == texts[0]  # equal tensors, half and half
    assert llm.generate_async(prompts[0], GREEDY, "plain").result().outputs[0].text == texts[0]
    for wrong in ("nothing", "../ours/plain", "/etc", "", "ours\0"):
        with pytest.raises(AdapterNotFoundError):
            llm.generate(prompts[0], GREEDY, wrong)


def test_a_chat_has_the_template_of_its_adapter_where_that_is_trusted(llm: LLM) -> None:
    base = "<s><|user|>What is the capital of France?<|assistant|>"
    names = ["team/zh", "chinese", "zh", "plain", None]
    outputs = llm.chat([CHAT] * 5, GREEDY, names)
    assert [one.prompt for one in outputs] == [f"{QUESTION}\nAnswer:"] * 2 + [base] * 3
    assert llm.chat(CHAT, GREEDY, "chinese").outputs[0].token_ids == outputs[0].outputs[0].token_ids
    assert outputs[2].prompt_token_ids == llm.tokenizer.encode(base, False)
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert llm.chat(parts, GREEDY, "chinese", chat_template_kwargs={"more": "!"}).prompt == "a\nb\nAnswer:!"
    tools = [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}]
    told = llm.chat(CHAT[-1:], GREEDY, chat_template=GEMMA, tools=tools).prompt
    assert told.startswith("<s><start_of_turn>user\nYou can call") and '"clock"' in told
    own = llm.chat(CHAT, GREEDY, chat_template="{{ messages[0].role }}{{ add_generation_prompt }}")
    assert own.prompt == "userTrue"
    begun = [*CHAT, {"role": "assistant", "content": "It is"}]
    goes_on = llm.chat(begun, GREEDY, add_generation_prompt=False, continue_final_message=True)
    assert goes_on.prompt.endswith("It is")


def test_defaults_hold_for_what_a_request_leaves_out(llm: LLM) -> None:
    prompt = f"{QUESTION}\nAnswer:"
    assert "巴" in llm.generate(prompt, None, "zh").outputs[0].text  # a stranger's are not read
    assert "巴黎" in llm.generate(prompt, SamplingParams(stop="never"), "chinese").outputs[0].text
    stopped = llm.generate(prompt, SamplingParams(), "chinese").outputs[0]
    assert (stopped.finish_reason, stopped.stop_reason, "巴" in stopped.text) == ("stop", "巴", False)
    free = llm.generate("a", None, "chinese").outputs[0]
    assert len(free.token_ids) <= 3
    half = llm.generate(prompt, None, [("chinese", 0.5), ("plain", 0.5)]).outputs[0]
    assert half.stop_reason != "巴"  # of several that act the base's text is used


def test_its_tokens_are_read_and_written(llm: LLM) -> None:
    only = [-1e9] * LAST + [0.0]
    params = SamplingParams(max_tokens=2, embedding_bias=only, ignore_eos=True, skip_special_tokens=False)
    out = llm.generate("a<|sql|>", params, "chinese")
    assert out.prompt_token_ids[-1] == LAST
    assert out.outputs[0].text == 2 * "<|sql|>"
    stranger = llm.generate("a<|sql|>", params, "zh")
    assert LAST not in stranger.prompt_token_ids
    assert "<|" not in stranger.outputs[0].text
    stream = llm.generate_async("a", params, "chinese", streaming=True)
    assert "".join(piece.outputs[0].text_diff for piece in stream) == 2 * "<|sql|>"


def test_one_with_wrong_files_fails_by_name_alone(llm: LLM) -> None:
    with pytest.raises(AdapterInvalidError, match=r"bad.*num_beams is not supported"):
        llm.generate("a", GREEDY, "bad")
    assert llm.generate("a", GREEDY, "plain").finished


def test_what_changes_on_disk_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LOOK_S", 0.0)
    folder = adapter(tmp_path / "one", generation_config={"max_new_tokens": 1})
    config = LoraConfig(max_lora_rank=16, max_loras=2)
    with LLM(DEMO / "base", lora_config=config, lora_root=tmp_path, lora_trust=[str(tmp_path)]) as llm:
        first = llm.generate(QUESTION, None, "one").outputs[0]
        assert (len(first.token_ids), first.lora_versions[0].version) == (1, 1)
        (folder / "generation_config.json").write_text('{"max_new_tokens": 2}')
        assert len(llm.generate(QUESTION, None, "one").outputs[0].token_ids) == 2
        (folder / "generation_config.json").write_text('{"max_new_tokens": ')
        assert len(llm.generate(QUESTION, None, "one").outputs[0].token_ids) == 2  # the last good ones
        (folder / "generation_config.json").unlink()
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            shutil.copy(DEMO / "adapters" / "japanese" / name, folder)
        second = llm.generate(QUESTION, GREEDY, "one").outputs[0]
        assert second.lora_versions[0].version == 2
        japanese = LoRARequest("japanese", 3, str(DEMO / "adapters" / "japanese"))
        assert second.token_ids == llm.generate(QUESTION, GREEDY, japanese).outputs[0].token_ids
        shutil.rmtree(folder)
        with pytest.raises(AdapterNotFoundError):
            llm.generate(QUESTION, GREEDY, "one")


def test_wrong_settings_are_refused(tmp_path: Path, llm: LLM) -> None:
    lora = LoraConfig(max_lora_rank=16, max_loras=1)
    for reason, given in {
        "lora_root needs a lora_config": {"lora_root": tmp_path},
        "lora_root .* is not a directory": {"lora_root": tmp_path / "no", "lora_config": lora},
        "lora_trust .* is not a directory": {"lora_trust": str(tmp_path / "no"), "lora_config": lora},
        "FOLDER=PART,PART": {"lora_trust": f"{tmp_path}=all", "lora_config": lora},
        "leave skip_tokenizer_init out": {"lora_trust": str(tmp_path), "skip_tokenizer_init": True},
        "leads back to itself": {"lora_alias": {"a": "b", "b": "a"}, "lora_config": lora},
    }.items():
        with pytest.raises(ConfigError, match=reason):
            LLM(DEMO / "base", **given)
    for reason, chat, given in [
        ("a role", ["a"], {}),
        ("parts of type text", [{"role": "user", "content": [{"type": "image"}]}], {}),
        ("there is none", [[]], {}),
        ("chat_template", CHAT, {"chat_template": "{% if %}"}),
        ("chat_template_kwargs must not have messages", CHAT, {"chat_template_kwargs": {"messages": 1}}),
        ("continue_final_message needs", CHAT, {"continue_final_message": True}),
    ]:
        with pytest.raises(ValueError, match=reason):
            llm.chat(chat, GREEDY, **given)


def test_the_template_of_transformers_gives_the_same_prompt(llm: LLM) -> None:
    from transformers import AutoTokenizer

    expected = AutoTokenizer.from_pretrained(DEMO / "base").apply_chat_template(
        CHAT, tokenize=False, add_generation_prompt=True
    )
    assert llm.chat(CHAT, GREEDY).prompt == expected == Tokenizer(DEMO / "base").chat(CHAT)


def test_the_models_own_values_hold_where_params_are_silent() -> None:
    override = {"temperature": 5.0, "max_new_tokens": 5}
    with LLM(DEMO / "base", device="cpu", override_generation_config=override) as made:
        assert made.get_default_sampling_params() == SamplingParams(temperature=5.0, max_tokens=5)
        assert made.generate([5, 6], None, use_tqdm=False).outputs[0].length <= 5
        asked = [SamplingParams(max_tokens=9, ignore_eos=True, seed=seed) for seed in range(4)]
        assert len({str(one.outputs[0].token_ids) for one in made.generate([[5, 6]] * 4, asked)}) > 1
        greedy = [SamplingParams(max_tokens=9, temperature=0.0, seed=seed) for seed in range(4)]
        assert len({str(one.outputs[0].token_ids) for one in made.generate([[5, 6]] * 4, greedy)}) == 1
    with pytest.raises(ConfigError, match="temprature is not supported"):
        LLM(DEMO / "base", device="cpu", override_generation_config={"temprature": 1})


def test_tools_and_earlier_calls_are_shown_to_a_model_that_knows_none(llm: LLM) -> None:
    function = {"name": "weather", "parameters": {"type": "object"}}
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    chat = [
        *CHAT,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    tools = [{"type": "function", "function": function}]
    prompt = llm.chat(chat, GREEDY, tools=tools).prompt
    assert json.dumps(function) in prompt and "Result of weather: sunny" in prompt
    assert '{"name": "weather", "arguments": {"city": "Rome"}}' in prompt
    assert llm.chat_async(chat, GREEDY, tools=tools).result().prompt == prompt
    for wrong in ([{"function": {"name": "f", "arguments": "["}}], ["f"], 5):
        with pytest.raises(ValueError, match="tool_calls must be like"):
            llm.chat([{"role": "assistant", "tool_calls": wrong}], GREEDY)
    with pytest.raises(ValueError, match="tools: each must be like"):
        llm.chat(CHAT, GREEDY, tools=["weather"])
