"""Protects the engine as a whole: greedy tokens equal transformers + PEFT in any company, through
chunking, prefix reuse, preemption, eviction and cancellation; and nothing leaks."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from running import let_arrive
from running import run as run_all
from running import tokens as some_tokens
from tiny_models import make_adapter, make_model, read_adapter_folder, reference_generate

from manylora.adapters.convert import convert_peft
from manylora.adapters.formats.base_weights import BaseWeights
from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.engine.engine import Engine
from manylora.errors import AdapterNotCachedError
from manylora.kernels import native
from manylora.request import Event, FinishReason, LoraInput, Request, SamplingConfig

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NEW = 12


class World:
    """One tiny model, a few adapters of mixed ranks and modules, and the reference answers."""

    def __init__(self, path: Path) -> None:
        picks = random.Random(3)
        self.model = make_model(path / "model", "llama", seed=1)
        self.adapters: dict[int, Path] = {}
        self.inputs: dict[int, LoraInput] = {}
        for task_id in range(1, 13):
            modules = tuple(m for m in MODULES if picks.random() < 0.6) or ("q_proj",)
            rank = picks.choice([1, 2, 4, 8, 16, 64])
            self.adapters[task_id] = make_adapter(
                path / f"adapter{task_id}", self.model, seed=task_id, rank=rank, modules=modules
            )
            weights, config = convert_peft(self.adapters[task_id], "float32")
            self.inputs[task_id] = LoraInput(task_id, weights, config)
        self._answers: dict[tuple, list[int]] = {}

    def answer(self, task_id: int | None, prompt: tuple[int, ...]) -> list[int]:
        key = (task_id, prompt)
        if key not in self._answers:
            adapter = self.adapters[task_id] if task_id else None
            self._answers[key] = reference_generate(self.model, adapter, list(prompt), NEW)
        return self._answers[key]

    def request(self, task_id: int | None, prompt: tuple[int, ...], **options: object) -> Request:
        lora = self.inputs[task_id] if task_id else None
        return Request(prompt, SamplingConfig(max_tokens=NEW), lora=lora, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


def engine(world: World, **options: object) -> Engine:
    lora = {"gpu_memory_bytes": 2**22, "host_memory_bytes": 2**24, **options.pop("lora", {})}  # type: ignore[dict-item]
    settings = {"device": "cpu", "max_seq_len": 128, "tokens_per_block": 4, **options}
    return Engine(EngineConfig(world.model, lora=LoraCacheConfig(**lora), **settings))  # type: ignore[arg-type]


def prompts(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    picks = random.Random(seed)
    return [tuple(picks.randrange(0, 250) for _ in range(picks.randint(1, 40))) for _ in range(count)]


def run(made: Engine) -> dict[int, list[Event]]:
    events: dict[int, list[Event]] = defaultdict(list)
    let_arrive(made)
    for _ in range(5000):
        if not made.has_work:
            break
        for handle, event in made.step():
            events[handle].append(event)
    assert not made.has_work
    made.check()
    return events


def tokens(events: list[Event]) -> list[int]:
    assert [e.last for e in events] == [False] * (len(events) - 1) + [True]
    assert events[-1].error is None
    return [t for e in events for t in e.token_ids]


def submit(made: Engine, request: Request) -> int:
    return made.submit(made.prepare(request))


@pytest.mark.quick
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_tokens": 16, "max_batch_size": 8},
        {"enable_kv_cache_reuse": False, "max_batch_size": 3},
        {"batch_scheduler_policy": "max_utilization", "max_tokens_in_paged_kv_cache": 160},
        {"lora": {"gpu_memory_bytes": None, "num_device_module_layer": 1500}},
    ],
    ids=["default", "chunked", "no-reuse", "preempted", "evicted"],
)
def test_a_mixed_batch_answers_as_the_reference(world: World, options: dict) -> None:
    made = engine(world, **options)
    wanted = {}
    for i, prompt in enumerate(prompts(30)):
        task_id = i % 13 or None
        wanted[submit(made, world.request(task_id, prompt, streaming=i % 2 == 0))] = (task_id, prompt)
    events = run(made)
    for handle, (task_id, prompt) in wanted.items():
        assert tokens(events[handle]) == world.answer(task_id, prompt), (task_id, prompt)
    stats = made.stats()
    assert stats.max_adapters_in_step > 1
    if "batch_scheduler_policy" in options:
        assert stats.preemptions > 0
    if "lora" in options:
        assert stats.adapters.device_evictions > 0
    assert stats.adapters.device_pinned == stats.adapters.host_pinned == 0
    assert stats.kv_blocks_free == stats.kv_blocks


def test_an_id_alone_is_enough_afterwards_and_unknown_without(world: World) -> None:
    made = engine(world)
    [prompt] = prompts(1)
    request = Request(prompt, SamplingConfig(max_tokens=NEW), lora=LoraInput(5))
    with pytest.raises(
        AdapterNotCachedError, match=r"LoRA task 5 not found in cache\. Please send LoRA weights"
    ):
        submit(made, request)
    submit(made, world.request(5, prompt))
    run(made)
    handle = submit(made, request)
    assert tokens(run(made)[handle]) == world.answer(5, prompt)
    assert made.stats().adapters.host_stores == 1


def test_cancelling_frees_everything_at_once(world: World) -> None:
    made = engine(world)
    handles = [
        submit(made, world.request(i % 4 or None, p, streaming=True)) for i, p in enumerate(prompts(12))
    ]
    made.step()
    for handle in handles:
        [(told, event)] = made.cancel(handle)
        assert (told, event.last, event.finish_reason) == (handle, True, FinishReason.CANCELLED)
    made.check()
    assert not made.has_work
    assert made.cancel(handles[0]) == []
    stats = made.stats()
    assert stats.kv_blocks_free == stats.kv_blocks
    assert stats.adapters.host_pinned == 0


def test_a_stream_has_the_wanted_number_of_tokens_in_each_event(world: World) -> None:
    """The first token does not wait, and logits are not kept for later."""
    prompt = prompts(1)[0]
    wanted = world.answer(3, prompt)
    log_probs = SamplingConfig(max_tokens=NEW, return_log_probs=True)
    logits = SamplingConfig(max_tokens=NEW, return_generation_logits=True)
    whole, made = engine(world), engine(world, stream_interval=4)
    plain = submit(whole, replace(world.request(3, prompt, streaming=True), params=log_probs))
    first, second, third = (
        submit(made, replace(world.request(3, prompt, streaming=streaming), params=params))
        for params, streaming in ((log_probs, True), (logits, True), (log_probs, False))
    )
    [alone, events] = run(whole)[plain], run(made)
    assert [len(event.token_ids) for event in alone] == [1] * NEW
    assert [len(event.token_ids) for event in events[first]] == [1, 4, 4, 3]
    assert [len(event.log_probs) for event in events[first]] == [1, 4, 4, 3]
    assert [p for e in events[first] for p in e.log_probs] == [p for e in alone for p in e.log_probs]
    assert [event.generation_logits.shape[0] for event in events[second]] == [1] * NEW  # type: ignore[union-attr]
    assert [len(event.token_ids) for event in events[third]] == [NEW]
    assert tokens(events[first]) == tokens(events[second]) == tokens(events[third]) == wanted


KINDS = ({"rank": 3}, {"rank": 64}, {"rank": 9, "use_dora": True}, {"rank": 16, "modules": MODULES[:3]})
PARAMS = SamplingConfig(max_tokens=9, return_log_probs=True, return_generation_logits=True)


@pytest.mark.skipif(native.load() is None, reason="products of torch depend on the number of rows")
def test_an_answer_has_the_same_bits_in_any_company(tmp_path: Path) -> None:
    """Alone, beside others with all kinds of adapters, and when its prompt is computed in several steps."""
    model = make_model(tmp_path / "model", "llama-biases", seed=3)
    inputs: list[LoraInput | None] = [None]
    for number, kind in enumerate(KINDS, 1):
        folder = make_adapter(tmp_path / str(number), model, number, **{"modules": MODULES, **kind})
        inputs.append(LoraInput(number, *read_adapter_folder(folder, BaseWeights(model))))
    requests = [  # prompts of one chunk and of several, two of each adapter
        Request(tuple(some_tokens(length, seed)), PARAMS, lora=inputs[seed % 5])
        for seed, length in enumerate((5, 90, 33, 70, 1, 100, 17, 64, 2, 40))
    ]
    config = EngineConfig(
        model, device="cpu", dtype="float32", max_seq_len=128, max_num_tokens=47, max_batch_size=16,
        enable_kv_cache_reuse=False, lora=LoraCacheConfig(gpu_memory_bytes=2**24),
    )  # fmt: skip
    assert config.chunk_tokens == 32
    made = Engine(config)
    together = run_all(made, *requests)
    for request, company in zip(requests, together, strict=True):
        [alone] = run_all(made, request)
        for name in ("token_ids", "log_probs"):
            assert sum((getattr(e, name) for e in alone), ()) == sum((getattr(e, name) for e in company), ())
        logits = [np.concatenate([e.generation_logits for e in events]) for events in (alone, company)]
        assert np.array_equal(*logits)
    made.close()
