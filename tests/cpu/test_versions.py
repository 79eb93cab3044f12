"""Protects versions of adapters and pins in engines of one and several processes: each token is made by the
version that is told, requests keep or follow as they ask, and nothing of an old version is met again."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from running import let_arrive, read, run, tokens
from tiny_models import load_transformers, make_adapter, make_model

from manylora import LLM, LoraConfig, LoRARequest, SamplingParams
from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.engine.engine import Engine
from manylora.errors import RequestError
from manylora.generation.outputs import LoraVersion
from manylora.model.checkpoint import read_model_config
from manylora.request import Event, LoraExtra, LoraInput, Request, SamplingConfig

pytestmark = pytest.mark.usefixtures("one_thread", "forked_ranks")

SWAPS = 20
TASK, NUM, WORDS, NEW = 9, 5, 40, 8
MODULES = ("q_proj", "v_proj", "o_proj", "down_proj")
PROMPTS = [tuple(tokens(5 + 9 * n, n)) for n in range(3)]
LONG = tuple(tokens(60))  # computed in several steps
ROOM = 600  # rows of rank 1: two adapters in one process or where ranks share a layer, four in stages
SIZES: list[dict[str, int]] = [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama", seed=1)


@pytest.fixture(scope="module")
def contents(model: Path) -> list[LoraInput]:
    """Adapters of two ranks, each with a head that knows WORDS tokens of its own, so that a token tells who
    made it."""
    made, config = [], read_model_config(model)
    for number in range(NUM):
        folder = make_adapter(model / str(number), model, number, 4 + 4 * (number % 2), MODULES)
        head = np.zeros((config.vocab_size, config.hidden_size), np.float32)
        half = np.random.default_rng(number).standard_normal((WORDS // 2, config.hidden_size))
        head[WORDS * number :][:WORDS] = np.concatenate([half, -half])  # one of each two is above 0
        extras = (LoraExtra("head.weight", head),)
        made.append(replace(read(folder, model, TASK), name="policy", extras=extras))
    return made


@pytest.fixture(scope="module")
def adapters(model: Path) -> list[Path]:
    return [make_adapter(model / f"plain{seed}", model, seed, 4, MODULES) for seed in (1, 2)]


def open_engine(model: Path, **options: Any) -> Engine:
    lora = LoraCacheConfig(num_device_module_layer=ROOM, num_host_module_layer=2 * ROOM, max_adapter_size=8)
    limits = {"max_seq_len": 128, "tokens_per_block": 4, "max_num_tokens": 16, "max_batch_size": 6}
    return Engine(EngineConfig(model, device="cpu", dtype="float32", lora=lora, **limits, **options))


@pytest.fixture(scope="module", params=SIZES, ids=["one process", "two of a layer", "two stages"])
def engine(model: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = open_engine(model, **request.param)
    yield made
    made.close()


@pytest.fixture(scope="module")
def alone(model: Path) -> Engine:
    return open_engine(model)


@pytest.fixture(scope="module")
def right(alone: Engine, contents: list[LoraInput]) -> dict[tuple[int, tuple[int, ...]], list[int]]:
    """What one process answers, by adapter and prompt."""
    return {(n, prompt): ask(alone, one, prompt) for n, one in enumerate(contents) for prompt in PROMPTS}


def ask(engine: Engine, lora: LoraInput, prompt: tuple[int, ...] = PROMPTS[1]) -> list[int]:
    [events] = run(engine, Request(prompt, SamplingConfig(max_tokens=NEW), lora))
    assert events[-1].error is None
    return [token for event in events for token in event.token_ids]


def test_each_token_is_of_the_version_that_is_told(
    engine: Engine, contents: list[LoraInput], right: dict[tuple[int, tuple[int, ...]], list[int]]
) -> None:
    """Swaps of one name under load. Requests that keep have the tokens of one process, those that follow go
    on with others, and some leave in the middle of their prompts."""
    assert len({tuple(one) for one in right.values()}) > 2 * NUM
    picks, params = random.Random(3), SamplingConfig(max_tokens=NEW)
    first_version = engine.publish(contents[0])
    digests, first_number = {first_version.digest: 0}, first_version.number
    asked: dict[int, tuple[int, tuple[int, ...], bool]] = {}
    outputs: dict[int, list[int]] = defaultdict(list)
    last: dict[int, Event] = {}
    current = swaps = 0
    while engine.has_work or swaps < SWAPS:
        leaving: list[int] = []
        if swaps < SWAPS and len(asked) - len(last) < 8:
            prompt, follow = picks.choice(PROMPTS), picks.random() < 0.5
            request = Request(prompt, params, replace(contents[current], follow=follow), streaming=True)
            handle = engine.submit(engine.prepare(request))
            asked[handle] = current, prompt, follow
            if picks.random() < 0.2:
                leaving.append(engine.submit(engine.prepare(replace(request, prompt=LONG))))
        for handle, event in engine.step():
            assert event.error is None
            outputs[handle] += event.token_ids
            if event.last:
                last[handle] = event
        for handle in leaving:
            assert engine.cancel(handle)
        if swaps < SWAPS and picks.random() < 0.5:
            current = (current + picks.randint(1, NUM - 1)) % NUM
            version = engine.publish(contents[current])
            digests[version.digest], swaps = current, swaps + 1
            assert version.number == first_number + swaps
        engine.check()
    assert len(digests) == NUM and last.keys() == asked.keys() and len(asked) > SWAPS // 2
    for handle, (first, prompt, follow) in asked.items():
        spans, output = last[handle].versions, outputs[handle]
        for position, token in enumerate(output):
            told = [span for span in spans if span.start <= position][-1]
            assert token // WORDS == digests[told.digest], (handle, position, output, spans)
        assert len(output) == NEW
        if not follow:
            assert ([digests[span.digest] for span in spans], output) == ([first], right[first, prompt])
    assert engine.stats().adapters.device_evictions
    assert engine.stats().adapters.sequence_swaps
    ask(engine, contents[current])
    assert not engine.library.versions.superseded, "old versions are dropped by the next step"


def test_one_that_follows_goes_on_as_in_one_process(
    alone: Engine, engine: Engine, contents: list[LoraInput]
) -> None:
    """With the keys and values of the old version on each rank, and the new one's matrices."""
    expected, found = (follow(one, contents) for one in (alone, engine))
    assert found == expected
    assert [token // WORDS for token in found[0]] == [1] * found[1] + [2] * (2 * NEW - found[1])


def follow(engine: Engine, contents: list[LoraInput]) -> tuple[list[int], int]:
    """The tokens, and how many of them are of the first version."""
    params = SamplingConfig(max_tokens=2 * NEW)
    request = Request(PROMPTS[1], params, replace(contents[1], follow=True), streaming=True)
    handle, output, swapped = engine.submit(engine.prepare(request)), [], False
    while engine.has_work:
        for number, event in engine.step():
            assert (number, event.error) == (handle, None)
            output += event.token_ids
        if len(output) == 5 and not swapped:
            engine.publish(contents[2])
            swapped = True
            [lease] = [one.next_version[0] for one in engine.open_sequences() if one.next_version]
            assert engine.adapters.admit(lease)
            engine.adapters.find_lost([lease])  # waits, so that both change at one token
    return output, event.versions[1].start


def test_a_pinned_version_stays_on_every_rank(
    engine: Engine, contents: list[LoraInput], right: dict[tuple[int, tuple[int, ...]], list[int]]
) -> None:
    """Others come and go in the rest of a small cache, and another version takes the pin's place."""
    prompt, pinned = PROMPTS[1], LoraInput(TASK, name="policy")
    engine.publish(contents[0])
    engine.adapters.pin(TASK)
    try:
        before = engine.stats().adapters.device_evictions
        for number in [1, 2, 3, 4] * 2:
            other = replace(contents[number], task_id=50 + number, name=None)
            assert ask(engine, other, prompt) == right[number, prompt]
            assert ask(engine, pinned, prompt) == right[0, prompt]
        assert engine.stats().adapters.device_evictions > before
        digest = engine.publish(contents[1]).digest
        for number in [0, 2, 3, 4]:
            other = replace(contents[number], task_id=50 + number, name=None)
            assert ask(engine, other, prompt) == right[number, prompt]
            assert engine.adapters._cache.on_device(digest)
        assert ask(engine, pinned, prompt) == right[1, prompt]
    finally:
        engine.adapters.unpin(TASK)
    engine.check()


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
