"""Protects what comes with an adapter in the Python API: names, chats, defaults, tokenizers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from own_text import GEMMA, adapter, shortened, with_token
from serving import DEMO

from manylora import LLM, LoraConfig, LoRARequest, SamplingParams
from manylora.errors import AdapterNotFoundError, ConfigError

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
