"""Protects activated LoRA: greedy tokens equal transformers + PEFT in any company, and the KV cache of what
is before an invocation is the base model's, shared by all, and nobody else's."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from parity import linear_names
from running import let_arrive, read, run, tokens
from tiny_models import load_transformers, make_adapter, make_model, read_adapter_folder

from manylora.adapters.catalog.levels import DiskLevel
from manylora.adapters.report import BaseModel, inspect_adapter
from manylora.adapters.tensors import Adapter
from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.doors.cli.convert import main as convert
from manylora.doors.triton.codec import decode_requests
from manylora.doors.triton.engine_client import request_tensors
from manylora.doors.triton.metrics import RequestMeter
from manylora.engine.engine import Engine
from manylora.errors import AdapterInvalidError, RequestError
from manylora.model.checkpoint import read_model_config
from manylora.request import ActivatedTokens, LoraInput, Request, SamplingConfig

INVOKE = {1: (7, 8, 9), 2: (11,), 3: (7, 8), 4: None}
"""By adapter; 4 is a plain one."""
NEW = 8
CACHE = LoraCacheConfig()
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Prompt = tuple[int, ...]


def make_activated(path: Path, model: Path, seed: int, invoke: Prompt | None, **options: object) -> Path:
    if invoke is not None:
        options |= {"alora_invocation_tokens": list(invoke), "task_type": "CAUSAL_LM"}
    return make_adapter(path, model, seed, **{"modules": MODULES, "rank": 4, **options})


@lru_cache
def adapted(model: Path, adapter: Path | None) -> torch.nn.Module:
    from peft import PeftModel

    found = load_transformers(model)
    return (found if adapter is None else PeftModel.from_pretrained(found, str(adapter))).eval()


class World:
    def __init__(
        self,
        path: Path,
        family: str = "llama",
        invoke: Mapping[int, Prompt | None] = INVOKE,
        **options: object,
    ) -> None:
        """options: of the adapters."""
        self.model = make_model(path / "model", family, seed=5)
        if family != "llama":
            options = {"modules": linear_names(read_model_config(self.model)).linears, **options}
        self.adapters: dict[int, Path] = {
            number: make_activated(path / str(number), self.model, number, one, **options)
            for number, one in invoke.items()
        }
        self.inputs: dict[int, LoraInput] = {n: read(p, self.model, n) for n, p in self.adapters.items()}
        self._answers: dict[tuple[int | None, Prompt], list[int]] = {}

    def answer(self, number: int | None, prompt: Prompt) -> list[int]:
        """By transformers and PEFT, which looks for the invocation in the prompt alone."""
        if (number, prompt) not in self._answers:
            module = adapted(self.model, self.adapters[number] if number else None)
            given = torch.tensor([prompt])
            with torch.inference_mode():
                made = module.generate(  # type: ignore[operator]
                    input_ids=given,
                    attention_mask=torch.ones_like(given),
                    max_new_tokens=NEW,
                    min_new_tokens=NEW,
                    do_sample=False,
                    eos_token_id=None,
                    pad_token_id=0,
                )
            self._answers[number, prompt] = made[0, len(prompt) :].tolist()
        return self._answers[number, prompt]

    def request(self, number: int | None, prompt: Prompt, **options: object) -> Request:
        lora = self.inputs[number] if number else None
        return Request(prompt, SamplingConfig(max_tokens=NEW), lora, **options)  # type: ignore[arg-type]

    def check(self, engine: Engine, *cases: tuple[int | None, Prompt]) -> None:
        """All at once."""
        for case, events in zip(cases, run(engine, *(self.request(*case) for case in cases)), strict=True):
            assert events[-1].error is None
            assert [t for event in events for t in event.token_ids] == self.answer(*case), case


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("activated"))


def open_engine(world: World, **options: object) -> Engine:
    lora = LoraCacheConfig(
        **{"gpu_memory_bytes": 2**22, "host_memory_bytes": 2**24, **options.pop("lora", {})}  # type: ignore[dict-item]
    )
    settings = {"device": "cpu", "max_seq_len": 256, "tokens_per_block": 4, **options}
    return Engine(EngineConfig(world.model, lora=lora, **settings))  # type: ignore[arg-type]


def cases(count: int, seed: int = 0) -> list[tuple[int | None, Prompt]]:
    """Prompts with invocations of any adapter anywhere, some of them in parts, some twice or not at all."""
    picks, found = random.Random(seed), list[tuple[int | None, Prompt]]()
    starts = [tokens(23, 1), tokens(40, 2)]
    for i in range(count):
        prompt = list(picks.choice(starts)[: picks.randint(1, 40)])
        for _ in range(picks.randint(0, 3)):
            prompt += picks.choice([(7, 8, 9), (11,), (7, 8), (7, 9), (8, 9)])
            prompt += tokens(picks.randint(0, 9), picks.randint(0, 5))
        found.append((i % 5 or None, tuple(prompt)))
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_tokens": 16, "max_batch_size": 8},
        {"enable_kv_cache_reuse": False, "max_batch_size": 3},
        {"batch_scheduler_policy": "max_utilization", "max_tokens_in_paged_kv_cache": 200},
        {"lora": {"gpu_memory_bytes": None, "max_adapter_size": 4, "num_device_module_layer": 80}},
    ],
    ids=["default", "chunked", "no-reuse", "preempted", "evicted"],
)
def test_a_mixed_batch_answers_as_peft(world: World, options: dict) -> None:
    engine = open_engine(world, **options)
    world.check(engine, *cases(20))
    world.check(engine, *cases(20))  # with what the first ones left in the cache
    stats = engine.stats()
    assert stats.max_adapters_in_step > 1
    assert stats.preemptions > 0 or "batch_scheduler_policy" not in options
    assert stats.adapters.device_evictions > 0 or "lora" not in options
    assert stats.kv_tokens_reused > 0 or "enable_kv_cache_reuse" in options


def test_metrics_tell_what_was_shared_and_where_it_acted(world: World) -> None:
    engine, shared = open_engine(world), tuple(tokens(80, 8))
    world.check(engine, (None, shared))
    meter, prompt = RequestMeter(), (*shared, *INVOKE[1], 3, 4)
    told = []
    for number, given in ((1, prompt), (1, shared), (4, prompt)):
        [events] = run(engine, world.request(number, given))
        assert events[-1].metrics is not None
        told.append(events[-1].metrics.activated)
        samples = meter.samples(LoraInput(number), events[-1])
        kinds = {
            dict(s.labels)["kind"]: s.value for s in samples if s.family.startswith("manylora_activated")
        }
        assert bool(kinds) == (number != 4)
        assert not kinds or kinds == asdict(told[-1])
    made = len(world.answer(1, prompt))
    assert told[0] == ActivatedTokens(before=80, shared=80, acted=5 + made)
    assert told[1] is not None and told[1].acted == 0
    assert told[1].before == 80 + len(world.answer(1, shared)) and told[1].shared >= 76
    assert told[2] is None


def test_ten_that_arrive_at_once_compute_their_prompt_once(world: World) -> None:
    """On an empty engine, and beside one that is cancelled while the others wait for it."""
    shared = tuple(tokens(160, 8))
    cases = [(i % 3 + 1, (*shared, 7, 8, 9, 11, i)) for i in range(10)]
    engine = open_engine(world)
    world.check(engine, *cases)
    assert engine.stats().kv_tokens_reused >= 9 * 160
    engine = open_engine(world, max_num_tokens=128)
    first, *handles = [engine.submit(engine.prepare(world.request(*case))) for case in cases]
    let_arrive(engine)
    engine.step()
    assert engine.stats().scheduled == 1
    engine.cancel(first)
    answers: dict[int, list[int]] = {handle: [] for handle in handles}
    while engine.has_work:
        for handle, event in engine.step():
            if handle in answers:
                answers[handle] += event.token_ids
    assert [answers[handle] for handle in handles] == [world.answer(*case) for case in cases[1:]]
    assert engine.stats().kv_tokens_reused >= 9 * 128
    engine.check()


@pytest.mark.parametrize("family", ["qwen3.5", "lfm2"])
def test_a_recurrent_state_before_an_invocation_is_the_base_models(tmp_path: Path, family: str) -> None:
    """What acts later leaves it as it is, and all may begin from it."""
    made = World(tmp_path, family, {number: one for number, one in INVOKE.items() if one})
    engine, shared = open_engine(made), tuple(tokens(141, 8))
    made.check(engine, *[(n, (*shared, *(INVOKE[n] or ()), 5, 6, 12)) for n in made.inputs])
    assert engine.stats().kv_tokens_reused >= 2 * 128, "the others began from the first one's state"
    before = engine.stats().kv_tokens_reused
    made.check(engine, (None, (*shared, 4, 5)), (1, (*shared, 7, 8, 9)))
    assert engine.stats().kv_tokens_reused - before >= 2 * 140
    engine.check()


def test_beams_drafts_and_bfloat16_pages(world: World) -> None:
    engine, prompt = open_engine(world, max_beam_width=2), (*tokens(30, 6), 7, 8, 9, 3)
    wanted = world.answer(1, prompt)
    draft = tuple(wanted[:3])
    [events] = run(engine, world.request(1, prompt, draft=draft))
    assert [t for event in events for t in event.token_ids] == wanted
    assert events[-1].metrics is not None and events[-1].metrics.accepted_draft_tokens == 3
    one = SamplingConfig(max_tokens=NEW, beam_width=2)
    beams = [
        run(made, Request(prompt, one, world.inputs[1]))[0][-1].beams
        for made in (engine, open_engine(world, max_beam_width=2, enable_kv_cache_reuse=False))
    ]
    assert beams[0] == beams[1] and beams[0]


def test_it_survives_every_form(world: World, tmp_path: Path) -> None:
    """The .npy files, the tensors of a request, the disk level; what has no place for it refuses it."""
    folder = world.adapters[1]
    assert convert(["-i", str(folder), "-o", str(tmp_path / "npy")]) == 0
    assert convert(["-i", str(folder), "-o", str(tmp_path / "a.safetensors"), "--to", "llgtrt"]) == 1
    with pytest.raises(AdapterInvalidError, match="activated LoRA"):
        read_adapter_folder(folder)
    sent = read(tmp_path / "npy", world.model, 1)
    assert sent.invocation == world.inputs[1].invocation == INVOKE[1]
    arrays = request_tensors(Request((1,), lora=sent))
    arrays |= {"request_output_len": np.array([[1]], np.int32)}
    again = decode_requests(arrays, "", True)[0].request.lora
    assert again is not None
    assert again.invocation == INVOKE[1]
    with pytest.raises(RequestError, match="goes with lora_weights"):
        del arrays["lora_weights"]
        decode_requests(arrays, "", True)
    report = inspect_adapter(tmp_path / "npy", BaseModel(world.model, read_model_config(world.model), CACHE))
    assert report.problem is None
    engine = open_engine(world)
    adapter = engine.adapters.prepare(again)
    assert isinstance(adapter, Adapter)
    assert adapter.digest == report.digest
    plain = engine.adapters.prepare(replace(again, extras=()))
    assert plain is not None
    assert plain.digest != adapter.digest
    level = DiskLevel(2**24, tmp_path / "disk")
    level.put(adapter)
    found = level.get(adapter.digest)
    assert found is not None
    assert found.extras[0].token_ids == INVOKE[1]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"modules_to_save": ["lm_head"]}, "head.weight would act before these tokens too"),
        ({"bias": "all"}, "bias would act before these tokens too"),
        ({"trainable_token_indices": [3]}, "would act before these tokens too"),
    ],
)
def test_what_acts_on_every_token_is_refused(
    world: World, tmp_path: Path, options: dict, reason: str
) -> None:
    model = world.model
    if "bias" in options:
        model = make_model(tmp_path / "model", "llama-biases", seed=5)
    folder = make_activated(tmp_path / "a", model, 1, (3,), **options)
    with pytest.raises(AdapterInvalidError, match=reason):
        read(folder, model)


def test_a_lora_bias_acts_where_its_matrices_do(tmp_path: Path) -> None:
    made = World(tmp_path, "llama-biases", {1: (7, 8)}, lora_bias=True, modules=("q_proj", "lm_head"))
    prompt = (*tokens(20, 3), 7, 8, 4)
    made.check(open_engine(made), (None, prompt[:20]), (1, prompt), (1, prompt[:20]), (None, prompt))
