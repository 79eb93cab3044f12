"""Protects versions of adapters under a name: each token is made by the version that the answer says,
requests keep or follow as they ask, and nothing of an old version is met again."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import torch
from running import let_arrive, read, tokens
from tiny_models import load_transformers, make_adapter, make_model

from manylora import LLM, LoraConfig, LoRARequest, SamplingParams
from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.engine.engine import Engine
from manylora.errors import RequestError
from manylora.generation.outputs import LoraVersion
from manylora.request import Event, LoraInput, Request, SamplingConfig


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama", seed=1)


@pytest.fixture(scope="module")
def adapters(model: Path) -> list[Path]:
    modules = ("q_proj", "v_proj", "down_proj")
    return [make_adapter(model / f"adapter{seed}", model, seed, 4, modules) for seed in (1, 2)]


def open_engine(model: Path, **options: object) -> Engine:
    lora = {"gpu_memory_bytes": 2**22, "host_memory_bytes": 2**23, **options.pop("lora", {})}  # type: ignore[dict-item]
    settings = {"device": "cpu", "max_seq_len": 128, "tokens_per_block": 4, **options}
    return Engine(EngineConfig(model, lora=LoraCacheConfig(**lora), **settings))  # type: ignore[arg-type]


def test_a_sequence_that_follows_goes_on_as_transformers_does(model: Path, adapters: list[Path]) -> None:
    """Its keys and values so far stay, and all that comes is made by the new version."""
    prompt, before, after = tokens(11), 7, 9
    engine = open_engine(model)
    old, new = (read(path, model, task_id=7) for path in adapters)
    follows = LoraInput(7, old.weights, old.config, follow=True)
    keeps = Request(tuple(prompt), SamplingConfig(max_tokens=before + after), LoraInput(7))
    handle = engine.submit(engine.prepare(Request(keeps.prompt, keeps.params, follows, streaming=True)))
    kept = engine.submit(engine.prepare(keeps))
    events: dict[int, list[Event]] = defaultdict(list)
    output: list[int] = []
    while engine.has_work:
        for number, event in engine.step():
            events[number].append(event)
            output += event.token_ids if number == handle else ()
        if len(output) == before and not engine.adapters.library.versions.num_changes:
            engine.publish(LoraInput(7, new.weights, new.config))
            let_arrive(engine)
        engine.check()
    (first, second) = events[handle][-1].versions
    assert (first.number, first.start, second.number) == (1, 0, 2)
    assert second.start == before
    assert output == by_transformers(model, adapters, prompt, before, after)
    assert list(events[kept][-1].token_ids) == by_transformers(model, adapters[:1] * 2, prompt, before, after)
    assert [(one.name, one.number) for one in events[kept][-1].versions] == [("7", 1)]


def by_transformers(
    model: Path, adapters: list[Path], prompt: list[int], before: int, after: int
) -> list[int]:
    """Greedy, with the cache of keys and values that the first adapter has begun."""
    from peft import PeftModel

    reference = PeftModel.from_pretrained(load_transformers(model), str(adapters[0]), "first").eval()
    reference.load_adapter(str(adapters[1]), "second")
    ids, cache, made = torch.tensor([prompt]), None, []
    with torch.inference_mode():
        for position in range(before + after):
            reference.set_adapter("first" if position < before else "second")
            found = reference(input_ids=ids, past_key_values=cache, use_cache=True)
            cache, ids = found.past_key_values, found.logits[:, -1:].argmax(-1)
            made.append(int(ids))
    return made


def test_blocks_of_two_versions_are_nobodys_prefix(model: Path, adapters: list[Path]) -> None:
    """A conversation goes on from an answer that two versions have made."""
    prompt = tuple(tokens(9))
    old, new = (read(path, model, task_id=3) for path in adapters)

    def answers(reuse: bool) -> list[tuple[int, ...]]:
        engine = open_engine(model, enable_kv_cache_reuse=reuse)
        first = Request(
            prompt, SamplingConfig(max_tokens=24), LoraInput(3, old.weights, old.config, follow=True)
        )
        handle, found = engine.submit(engine.prepare(first)), []
        for _ in range(12):
            engine.step()
        engine.publish(LoraInput(3, new.weights, new.config))
        let_arrive(engine)  # so that both change at one token
        events = finish(engine)
        found.append(events[handle][-1].token_ids)
        assert len(events[handle][-1].versions) == 2
        for lora in (LoraInput(3), LoraInput(4, old.weights, old.config)):
            again = Request(prompt + found[0], SamplingConfig(max_tokens=12), lora)
            handle = engine.submit(engine.prepare(again))
            found.append(finish(engine)[handle][-1].token_ids)
        return found

    assert answers(reuse=True) == answers(reuse=False)


def test_what_nobody_means_any_more_is_dropped(model: Path, adapters: list[Path]) -> None:
    old, new = (read(path, model, task_id=3) for path in adapters)
    engine = open_engine(model)
    prompt = tuple(tokens(21))

    def ask(lora: LoraInput) -> Event:
        handle = engine.submit(engine.prepare(Request(prompt, SamplingConfig(max_tokens=2), lora)))
        return finish(engine)[handle][-1]

    for task_id in (3, 4):
        ask(LoraInput(task_id, old.weights, old.config))
    assert ask(LoraInput(4)).metrics.kv_reused_blocks == 5  # type: ignore[union-attr]
    engine.publish(LoraInput(3, new.weights, new.config))
    assert ask(LoraInput(4)).metrics.kv_reused_blocks == 5  # type: ignore[union-attr]  # 4 means it still
    assert ask(LoraInput(3)).metrics.kv_reused_blocks == 0  # type: ignore[union-attr]
    assert ask(LoraInput(4, new.weights, new.config)).metrics.kv_reused_blocks == 5  # type: ignore[union-attr]
    assert ask(LoraInput(5, old.weights, old.config)).metrics.kv_reused_blocks == 0  # type: ignore[union-attr]


def test_beams_do_not_follow() -> None:
    with pytest.raises(RequestError, match="lora_version follow needs beam_width 1"):
        Request((1,), SamplingConfig(beam_width=2), LoraInput(1, follow=True))


def finish(engine: Engine) -> dict[int, list[Event]]:
    events: dict[int, list[Event]] = defaultdict(list)
    while engine.has_work:
        for handle, event in engine.step():
            events[handle].append(event)
        engine.check()
    return events


def test_tensors_of_a_trainer_in_the_same_process(model: Path, adapters: list[Path]) -> None:
    """As PEFT has them in memory; the answers are those of the same adapters from their folders."""
    from peft import PeftModel, get_peft_model_state_dict

    params = SamplingParams(max_tokens=8, temperature=0.0)
    prompt = tokens(9)
    with LLM(model, skip_tokenizer_init=True, lora_config=LoraConfig(), device="cpu") as llm:
        expected = [
            llm.generate(prompt, params, LoRARequest("a", number, str(path))).outputs[0].token_ids
            for number, path in enumerate(adapters, 1)
        ]
        policy = LoRARequest("policy", 7, None)
        digests = []
        for number in (1, 2, 3):
            trained = PeftModel.from_pretrained(load_transformers(model), str(adapters[(number - 1) % 2]))
            config = trained.peft_config["default"].to_dict()
            tensors = get_peft_model_state_dict(trained)
            version = llm.load_adapter(policy, tensors, config)
            assert (version.name, version.number) == ("policy", number)
            digests.append(version.digest)
            [output] = llm.generate(prompt, params, policy).outputs
            assert output.token_ids == expected[(number - 1) % 2]
            assert output.lora_versions == (LoraVersion("policy", number, version.digest, 0, 8),)
        assert digests[0] == digests[2] != digests[1]
        assert llm.generate(prompt, params).outputs[0].lora_versions == ()
        with pytest.raises(RequestError, match="another path"):
            llm.generate(prompt, params, LoRARequest("policy", 7, str(adapters[0])))
        with pytest.raises(RequestError, match="NO_SUCH"):
            llm.load_adapter(policy, tensors, {"peft_type": "NO_SUCH"})
        assert llm.generate(prompt, params, policy).outputs[0].lora_versions[0].version == 3
    with pytest.raises(ValueError, match="lora_version must be 'keep' or 'follow'"):
        LoRARequest("policy", 7, None, lora_version="newest")
