"""Protects the engine as a whole: greedy tokens equal transformers + PEFT in any company, through chunking,
prefix reuse, preemption, eviction and cancellation; nothing leaks, and no request ever has anything of
another's adapter: failures that multi-adapter servers have had (docs/deploy.md)."""

from __future__ import annotations

import random
import shutil
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from running import let_arrive, read, tokens_of
from running import run as run_all
from running import tokens as some_tokens
from safetensors.torch import load_file, save_file
from tiny_models import make_adapter, make_model, reference_generate

from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.engine.engine import Engine
from manylora.errors import AdapterError, RequestError
from manylora.kernels import native
from manylora.request import Event, FinishReason, LoraInput, Request, SamplingConfig

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NEW = 12
PROMPT = tuple(some_tokens(20, 4))
ALL, DORA, VALUES, HEAD = range(13, 17)
KINDS: dict[int, dict[str, Any]] = {
    ALL: {"modules": MODULES},
    DORA: {"modules": MODULES, "rank": 4, "use_dora": True},
    VALUES: {"modules": ("v_proj",), "rank": 5},
    HEAD: {"modules": ("q_proj",), "modules_to_save": ["lm_head"]},
}
"""By task id; those before it have ranks and modules by chance."""


class World:
    """One tiny model, adapters, and the reference answers."""

    def __init__(self, path: Path) -> None:
        picks = random.Random(3)
        self.model = make_model(path / "model", "llama", seed=1)
        self.adapters: dict[int, Path] = {}
        self.inputs: dict[int, LoraInput] = {}
        for task_id in range(1, HEAD + 1):
            modules = tuple(m for m in MODULES if picks.random() < 0.6) or ("q_proj",)
            options = {"rank": picks.choice([1, 2, 4, 8, 16, 64]), "modules": modules}
            folder = path / f"adapter{task_id}"
            make_adapter(folder, self.model, task_id, **KINDS.get(task_id, options))
            self.adapters[task_id], self.inputs[task_id] = folder, read(folder, self.model, task_id)
        self._answers: dict[tuple, list[int]] = {}

    def answer(self, task_id: int | None, prompt: tuple[int, ...] = PROMPT) -> list[int]:
        key = (task_id, prompt)
        if key not in self._answers:
            adapter = self.adapters[task_id] if task_id else None
            self._answers[key] = reference_generate(self.model, adapter, list(prompt), NEW)
        return self._answers[key]

    def request(
        self, lora: LoraInput | int | None, prompt: tuple[int, ...] = PROMPT, **options: Any
    ) -> Request:
        lora = self.inputs[lora] if isinstance(lora, int) else lora
        return Request(prompt, SamplingConfig(max_tokens=NEW), lora, **options)

    def under(self, task_id: int, number: int) -> LoraInput:
        """The adapter of this number, under another task id."""
        return replace(self.inputs[number], task_id=task_id)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


def engine(world: World, **options: Any) -> Engine:
    lora = {"gpu_memory_bytes": 2**22, "host_memory_bytes": 2**24, **options.pop("lora", {})}
    settings = {"device": "cpu", "max_seq_len": 128, "tokens_per_block": 4, **options}
    return Engine(EngineConfig(world.model, lora=LoraCacheConfig(**lora), **settings))


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
        task_id = i % (HEAD + 1) or None
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


PARAMS = SamplingConfig(max_tokens=9, return_log_probs=True, return_generation_logits=True)


@pytest.mark.skipif(native.load() is None, reason="products of torch depend on the number of rows")
def test_an_answer_has_the_same_bits_in_any_company(tmp_path: Path) -> None:
    """Alone, beside others with all kinds of adapters, and when its prompt is computed in several steps."""
    model = make_model(tmp_path / "model", "llama-biases", seed=3)
    inputs: list[LoraInput | None] = [None]
    for number, kind in enumerate(
        ({"rank": 3}, {"rank": 64}, {"rank": 9, "use_dora": True}, KINDS[VALUES]), 1
    ):
        folder = make_adapter(tmp_path / str(number), model, number, **{"modules": MODULES, **kind})
        inputs.append(read(folder, model, number))
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


def test_the_base_does_not_answer_in_an_adapters_place(world: World, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"LoRA task 99 not found in cache\. Please send LoRA weights"):
        submit(engine(world), world.request(LoraInput(99)))
    for rename in (
        lambda name: name.replace("model.layers", "language_model.blocks"),
        lambda name: name.replace("v_proj", "value"),
        lambda name: name.replace("layers.1.", "blocks.1."),  # the other layer is understood
    ):
        folder = shutil.copytree(world.adapters[VALUES], tmp_path / str(rename.__code__.co_consts))
        file = folder / "adapter_model.safetensors"
        save_file({rename(name): one for name, one in load_file(file).items()}, file)
        with pytest.raises(AdapterError):
            read(folder, world.model, 7)


def test_kv_of_the_base_or_of_another_adapter_is_not_reused(world: World) -> None:
    """Not under a task id that came again either."""
    made = engine(world)
    for number in (None, ALL, DORA, None, ALL, VALUES):
        lora = None if number is None else world.under(1, number)
        for repeat in range(2):
            [events] = run_all(made, world.request(lora))
            assert tokens_of(events) == world.answer(number), (number, repeat)
        metrics = events[-1].metrics
        assert metrics is not None and metrics.kv_reused_blocks, "its own blocks are"


def test_an_adapter_is_not_evicted_under_a_request_in_flight(world: World) -> None:
    """The device has room for one adapter of its rank: the others wait until the request has ended."""
    made = engine(world, lora={"gpu_memory_bytes": None, "max_loras": 1, "max_lora_rank": 8})
    asked = {submit(made, world.request(ALL, streaming=True)): ALL}
    events: dict[int, list[Event]] = defaultdict(list)
    for handle, event in made.step():
        events[handle].append(event)
    asked |= {submit(made, world.request(number)): number for number in (DORA, ALL, None, VALUES)}
    for handle, more in run(made).items():
        events[handle] += more
    assert made.stats().adapters.device_evictions, "there was no need to evict"
    for handle, number in asked.items():
        assert tokens_of(events[handle]) == world.answer(number), number


def test_a_module_outside_the_targets_is_not_dropped(world: World) -> None:
    made = engine(world, lora={"target_modules": ("attn_q", "attn_k", "attn_v")})
    assert tokens_of(run_all(made, world.request(VALUES))[0]) == world.answer(VALUES)
    with pytest.raises(RequestError, match=r"attn_dense|mlp_"):
        submit(made, world.request(ALL))


def test_prompts_of_one_salt_are_not_found_by_another(world: World) -> None:
    made = engine(world)

    def reused(salt: str) -> int:
        [events] = run_all(made, world.request(ALL, cache_salt=salt))
        assert tokens_of(events) == world.answer(ALL) and events[-1].metrics is not None
        return events[-1].metrics.kv_reused_blocks

    assert [reused("one"), reused("two"), reused("")] == [0, 0, 0]
    assert min(reused("one"), reused("two"), reused("")) > 0


def test_equal_adapters_of_two_tenants_share_memory_and_their_ids_stay_apart(world: World) -> None:
    """What is shared is bytes that both have sent; taking one away leaves the other."""
    made = engine(world)
    for lora, number, stored in (
        (world.under(11, ALL), ALL, 1),
        (world.under(12, ALL), ALL, 1),
        (world.under(11, DORA), DORA, 2),
        (LoraInput(12), ALL, 2),
        (LoraInput(11), DORA, 2),
    ):
        assert tokens_of(run_all(made, world.request(lora))[0]) == world.answer(number)
        assert made.stats().adapters.host_adapters == stored


@pytest.mark.parametrize(
    ("file", "content"),
    [("adapter_model.safetensors", b"\x08\0\0\0\0\0\0\0not JSON"), ("adapter_config.json", b"{")],
    ids=["header", "config"],
)
def test_an_error_names_its_own_adapter_and_no_path(
    world: World, tmp_path: Path, file: str, content: bytes
) -> None:
    made = engine(world, lora={"catalog_dir": tmp_path})
    for tenant in ("broken", "neighbour"):
        shutil.copytree(world.adapters[ALL], tmp_path / tenant)
    (tmp_path / "broken" / file).write_bytes(content)
    with pytest.raises(AdapterError) as error:
        submit(made, world.request(made.adapters.library.resolve(LoraInput(None, name="broken"))))
    text = str(error.value)
    assert file in text and "neighbour" not in text and str(tmp_path) not in text
