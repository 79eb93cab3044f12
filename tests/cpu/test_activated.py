"""Protects activated LoRA: greedy tokens equal transformers + PEFT in any company, and the KV cache of what
is before an invocation is the base model's, shared by all, and nobody else's."""

from __future__ import annotations

import random
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from running import read, run, tokens

from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.engine.engine import Engine
from manylora.request import LoraInput, Request, SamplingConfig
from manylora.testing.tiny_models import load_transformers, make_adapter, make_model

INVOKE = {1: (7, 8, 9), 2: (11,), 3: (7, 8), 4: None}
"""By adapter; 4 is a plain one."""
NEW = 10
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
    def __init__(self, path: Path, family: str = "llama") -> None:
        self.model = make_model(path / "model", family, seed=5)
        self.adapters: dict[int, Path] = {
            number: make_activated(path / str(number), self.model, number, invoke)
            for number, invoke in INVOKE.items()
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
