"""Protects encoder-decoder models: greedy tokens equal transformers + PEFT with adapters on both stacks, in
any company, through preemption and chunking; nothing leaks; what is not served is refused with the reason."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity import linear_names
from running import answers, check_greedy
from selection import extended
from tiny_configs import ENCODER_DECODER_FAMILIES
from tiny_models import make_adapter, make_model, read_adapter_folder, reference_generate

from manylora.adapters.convert import convert_peft
from manylora.adapters.formats.base_weights import BaseWeights
from manylora.adapters.modules import lora_modules
from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.doors.python import LLM, KvCacheConfig, LoraConfig, LoRARequest, SamplingParams
from manylora.engine.engine import Engine
from manylora.errors import AdapterInvalidError, RequestError
from manylora.generation.tokenizer import Tokenizer
from manylora.model.checkpoint import read_model_config
from manylora.request import LoraInput, Request, SamplingConfig

NEW = 7
Ids = tuple[int, ...]


def kinds(model: Path) -> dict[str, dict[str, Any]]:
    names = linear_names(read_model_config(model)).linears
    cross = ("encoder_attn" if "fc1" in names else "EncDecAttention") + "." + names[0]
    return {
        "every linear layer": {"rank": 5, "modules": names},
        "rank 64, cross-attention": {"rank": 64, "modules": (cross, cross[: -len(names[0])] + names[3])},
        "DoRA": {"rank": 3, "modules": names, "use_dora": True},
        "patterns": {
            "rank": 2,
            "modules": names,
            "rank_pattern": {f"decoder.*{names[1]}": 9},
            "use_rslora": True,
        },
    }


class World:
    def __init__(self, path: Path, family: str) -> None:
        self.model = make_model(path / "model", family, seed=7)
        self.config = read_model_config(self.model)
        self.modules = lora_modules(self.config)
        self.adapters: dict[int, Path] = {}
        self.inputs: dict[int, LoraInput] = {}
        for task_id, options in enumerate(kinds(self.model).values(), 1):
            self.adapters[task_id] = make_adapter(path / f"a{task_id}", self.model, task_id, **options)
            tensors = read_adapter_folder(self.adapters[task_id], BaseWeights(self.model), self.modules)
            self.inputs[task_id] = LoraInput(task_id, *tensors)

    @property
    def start(self) -> int:
        assert self.config.encoder is not None
        return self.config.encoder.decoder_start_id

    def answer(self, task_id: int | None, ids: Ids, decoder: Ids = ()) -> list[int]:
        prompt = decoder or (self.start,)
        return reference_generate(self.model, self.adapters.get(task_id or 0), prompt, NEW, ids)

    def check(self, found: Sequence[int], task_id: int | None, ids: Ids, decoder: Ids = ()) -> None:
        adapter, prompt = self.adapters.get(task_id or 0), decoder or (self.start,)
        check_greedy(found, NEW, self.model, adapter, prompt, ids)

    def request(self, task_id: int | None, ids: Ids, decoder: Ids = ()) -> Request:
        lora = self.inputs[task_id] if task_id else None
        return Request(decoder, SamplingConfig(max_tokens=NEW), lora, encoder_prompt=ids)

    def engine(self, **options: Any) -> Engine:
        settings: dict[str, Any] = {
            "max_batch_size": 4,
            "max_num_tokens": 96,
            "max_seq_len": 64,
            "tokens_per_block": 4,
            **options,
        }
        lora = LoraCacheConfig(host_memory_bytes=2**25)
        return Engine(EngineConfig(self.model, device="cpu", lora=lora, **settings))


@pytest.fixture(scope="module", params=ENCODER_DECODER_FAMILIES)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    torch.set_num_threads(1)
    return World(tmp_path_factory.mktemp("both"), request.param)


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("t5"), "t5-v1.1")


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("bart"), "bart")


def texts(count: int, seed: int = 1) -> list[Ids]:
    picks = random.Random(seed)
    return [tuple(picks.randrange(250) for _ in range(picks.randrange(1, 40))) for _ in range(count)]


@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
def test_tokens_equal_the_reference_in_mixed_company(world: World, policy: str) -> None:
    asked = [(task_id, ids) for task_id, ids in zip((None, 1, 2, 3, 4, 1, None, 3), texts(8), strict=True)]
    tight = {"max_tokens_in_paged_kv_cache": 128} if policy == "max_utilization" else {}
    engine = world.engine(batch_scheduler_policy=policy, **tight)
    found = answers(engine, *(world.request(*one) for one in asked))
    for answer, one in zip(found, asked, strict=True):
        world.check(answer, *one)
    assert engine.stats().kv_blocks_free == engine.stats().kv_blocks
    if policy == "guaranteed_no_evict":  # nothing is computed twice
        assert engine.stats().prompt_tokens == sum(len(ids) + 1 for _, ids in asked)
    assert len({tuple(tokens) for tokens in found}) > 5, "the answers hardly differ: this proves nothing"


def check_long_decoder_prompt(world: World, **ranks: int) -> None:
    ids, other = texts(2, seed=5)
    decoder = (world.start, *texts(1, seed=9)[0][:30], 5, 6, 7)
    engine = world.engine(max_num_tokens=48, **ranks)
    request = world.request(1, ids, decoder)
    try:
        for _ in range(2):
            [found] = answers(engine, request)
            world.check(found, 1, ids, decoder)
        assert engine.stats().kv_tokens_reused >= 8
        # The same tokens after another text have other keys and values.
        before = engine.stats().kv_tokens_reused
        [found] = answers(engine, world.request(1, other, decoder))
        world.check(found, 1, other, decoder)
        assert engine.stats().kv_tokens_reused == before
    finally:
        engine.close()


def test_a_decoder_prompt_is_continued_also_in_chunks_and_from_the_cache(world: World) -> None:
    check_long_decoder_prompt(world)


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("stages", [1, *extended(2)])
def test_ranks_continue_a_decoder_prompt_in_chunks_and_from_the_cache(bart: World, stages: int) -> None:
    """A step of which no logits are wanted has none of any rank's tokens, though there is a bias of all."""
    check_long_decoder_prompt(bart, tensor_parallel_size=2, pipeline_parallel_size=stages)


def check_preempted(world: World, **ranks: int) -> None:
    asked = [(task_id, ids[:20]) for task_id, ids in zip((1, None, 2, 3), texts(4, seed=3), strict=True)]
    engine = world.engine(
        batch_scheduler_policy="max_utilization",
        max_seq_len=32,
        max_tokens_in_paged_kv_cache=72,
        tokens_per_block=2,
        **ranks,
    )
    try:
        found = answers(engine, *(world.request(*one) for one in asked))
        for answer, one in zip(found, asked, strict=True):
            world.check(answer, *one)
        assert engine.stats().preemptions > 0
    finally:
        engine.close()


def test_preempted_sequences_are_encoded_again(world: World) -> None:
    check_preempted(world)


@pytest.mark.usefixtures("forked_ranks")
def test_stages_encode_preempted_sequences_again(t5: World) -> None:
    check_preempted(t5, pipeline_parallel_size=2)


def test_a_forced_token_follows_the_start(bart: World, tmp_path: Path) -> None:
    model = shutil.copytree(bart.model, tmp_path / "model")
    settings = json.loads((model / "generation_config.json").read_text(encoding="utf-8"))
    settings["forced_bos_token_id"] = 256
    (model / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
    engine = Engine(EngineConfig(model, device="cpu", max_seq_len=32))
    ids = texts(1)[0]
    expected = [256, *bart.answer(None, ids, (bart.start, 256))[: NEW - 1]]
    assert answers(engine, bart.request(None, ids)) == [expected]
    assert answers(engine, bart.request(None, ids, (bart.start, 9))) == [
        bart.answer(None, ids, (bart.start, 9))
    ]


def test_adapters_that_do_not_suit_are_refused(t5: World, bart: World, tmp_path: Path) -> None:
    with pytest.raises(AdapterInvalidError, match="--base"):
        convert_peft(t5.adapters[1])
    llama = make_model(tmp_path / "llama", "llama", seed=1)
    with pytest.raises(AdapterInvalidError, match="this model has no encoder"):
        read_adapter_folder(bart.adapters[1], None, lora_modules(read_model_config(llama)))


def test_what_is_not_served_is_refused_by_name(t5: World, tmp_path: Path) -> None:
    engine, ids = t5.engine(max_beam_width=2), texts(1)[0]
    plain = t5.request(None, ids)
    table = np.zeros((1, t5.config.hidden_size), np.float16)
    for request, reason in (
        (replace(plain, params=SamplingConfig(beam_width=2)), "beam search is not supported on encoder"),
        (replace(plain, draft=(1, 2)), "draft_input_ids are not supported on encoder"),
        (replace(plain, prompt_table=table), "prompt_embedding_table is not supported on encoder"),
        (
            replace(plain, encoder_prompt=(1,) * 65),
            r"Prompt length \(65\) exceeds maximum input length \(64\)",
        ),
        (replace(plain, encoder_prompt=(1, 9999)), r"input_ids must be in \[0, 272\)"),
        (replace(plain, prompt=(9999,)), r"input_ids must be in \[0, 272\)"),
        (replace(plain, encoder_prompt=()), "the encoder's prompt has no tokens"),
    ):
        with pytest.raises(RequestError, match=reason):
            engine.prepare(request)
    llama = make_model(tmp_path / "llama", "llama", seed=1)
    decoder = Engine(EngineConfig(llama, device="cpu", max_seq_len=32))
    with pytest.raises(RequestError, match="this model has no encoder"):
        decoder.prepare(plain)


def test_t5_may_be_longer_than_it_was_trained(t5: World) -> None:
    engine = t5.engine(max_seq_len=700, max_num_tokens=1024, max_batch_size=1)
    assert engine.max_seq_len == 700
    ids = tuple(i % 250 for i in range(650))
    assert answers(engine, t5.request(1, ids)) == [t5.answer(1, ids)]


def test_llm_generates_from_a_text_and_from_a_decoder_prompt(bart: World) -> None:
    tokenizer = Tokenizer(bart.model)
    assert tokenizer.decoder_start_id == bart.start
    texts = ["The capital of France", "An adapter", "Third"]
    params = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
    lora = LoRARequest("one", 1, str(bart.adapters[1]))
    with LLM(
        bart.model,
        lora_config=LoraConfig(max_lora_rank=64),
        kv_cache_config=KvCacheConfig(tokens_per_block=8),
        max_seq_len=64,
        max_batch_size=4,
    ) as llm:
        prompts = [*texts, {"prompt": texts[0], "decoder_input_token_ids": [bart.start, 42]}]
        outputs = llm.generate(prompts, params, [None, lora, lora, lora], use_tqdm=False)
        for text, task_id, decoder, output in zip(
            [*texts, texts[0]], (None, 1, 1, 1), ((), (), (), (bart.start, 42)), outputs, strict=True
        ):
            ids = tuple(tokenizer.encode(text))
            assert output.outputs[0].token_ids == bart.answer(task_id, ids, decoder)
            assert output.prompt_token_ids == list(ids)
        with pytest.raises(ValueError, match="decoder_input_token_ids must be a list of token ids"):
            llm.generate({"prompt": "x", "decoder_input_token_ids": []}, params)
