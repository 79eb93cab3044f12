"""Protects what one request must never have from another's adapter. Each test is named after a failure that
multi-adapter servers have had (docs/deploy.md), and expects the answer of transformers and PEFT."""

from __future__ import annotations

import random
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from running import read, run, tokens_of
from safetensors.torch import load_file, save_file
from tiny_models import make_adapter, make_model, reference_generate

from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.engine.engine import Engine
from manylora.errors import AdapterError, RequestError
from manylora.request import Event, LoraInput, Request, SamplingConfig

NEW = 6
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
KINDS: list[dict[str, Any]] = [
    {"modules": ALL}, {"modules": ALL, "rank": 4, "use_dora": True}, {"modules": ("v_proj",), "rank": 5},
    {"modules": ("q_proj",), "modules_to_save": ["lm_head"]},
]  # fmt: skip


class World:
    """A model, adapters of several kinds, and what transformers and PEFT answer under each."""

    def __init__(self, folder: Path) -> None:
        picks = random.Random(4)
        self.folder = folder
        self.model = make_model(folder / "model", seed=1)
        self.paths: list[Path | None] = [None]
        self.paths += [
            make_adapter(folder / f"adapter{i}", self.model, seed=i, **kind) for i, kind in enumerate(KINDS)
        ]
        self.prompt = tuple(picks.randrange(250) for _ in range(20))
        self.answers = [reference_generate(self.model, path, self.prompt, NEW) for path in self.paths]
        assert len({tuple(answer) for answer in self.answers}) == len(self.answers), "none is another's"

    def lora(self, number: int, task_id: int = 0) -> LoraInput | None:
        path = self.paths[number]
        return None if path is None else read(path, self.model, task_id or number)

    def request(self, lora: LoraInput | None, **options: Any) -> Request:
        return Request(self.prompt, SamplingConfig(max_tokens=NEW), lora, **options)

    def engine(self, **options: Any) -> Engine:
        cache = {"gpu_memory_bytes": 2**22, "host_memory_bytes": 2**22, **options.pop("lora", {})}
        settings = {"device": "cpu", "tokens_per_block": 4, "max_seq_len": 64, **options}
        return Engine(EngineConfig(self.model, lora=LoraCacheConfig(**cache), **settings))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("isolation"))


def changed(source: Path, target: Path, rename: Any) -> Path:
    """A copy of an adapter whose tensors have other names."""
    shutil.copytree(source, target)
    tensors = load_file(source / "adapter_model.safetensors")
    save_file({rename(name): one for name, one in tensors.items()}, target / "adapter_model.safetensors")
    return target


def test_the_base_does_not_answer_in_an_adapters_place(world: World, tmp_path: Path) -> None:
    engine = world.engine()
    with pytest.raises(RequestError, match="LoRA task 99 not found in cache"):
        engine.submit(engine.prepare(world.request(LoraInput(99))))
    source = world.paths[3]
    assert source is not None
    for rename in (
        lambda name: name.replace("model.layers", "language_model.blocks"),
        lambda name: name.replace("v_proj", "value"),
        lambda name: name.replace("layers.1.", "blocks.1."),  # the other layer is understood
    ):
        folder = changed(source, tmp_path / str(rename.__code__.co_consts), rename)
        with pytest.raises(AdapterError):
            read(folder, world.model, 7)


def test_the_first_rows_adapter_does_not_serve_the_whole_batch(world: World) -> None:
    engine = world.engine()
    order = [*range(len(world.paths)), *reversed(range(len(world.paths)))]
    for _ in range(2):  # the second time all adapters are in the cache already
        found = run(engine, *(world.request(world.lora(number)) for number in order))
    assert engine.stats().max_adapters_in_step == len(world.paths) - 1, "they were in one step"
    assert [tokens_of(events) for events in found] == [world.answers[number] for number in order]


def test_another_adapters_kv_is_not_reused_under_a_task_id_that_came_again(world: World) -> None:
    engine = world.engine()
    for number in (1, 2, 1, 3):
        for repeat in range(2):
            [events] = run(engine, world.request(world.lora(number, task_id=1)))
            assert tokens_of(events) == world.answers[number], (number, repeat)
        metrics = events[-1].metrics
        assert metrics is not None and metrics.kv_reused_blocks, "its own blocks are"


def test_the_bases_kv_is_not_reused_under_an_adapter_and_an_adapters_not_by_the_base(world: World) -> None:
    engine = world.engine()
    for number in (0, 2, 0, 2):
        [events] = run(engine, world.request(world.lora(number)))
        assert tokens_of(events) == world.answers[number], number


def test_an_adapter_is_not_evicted_under_a_request_in_flight(world: World) -> None:
    """The device has room for one adapter of its rank: the others wait until the request has ended."""
    engine = world.engine(lora={"gpu_memory_bytes": None, "max_loras": 1, "max_lora_rank": 8})
    started = engine.submit(engine.prepare(world.request(world.lora(1), streaming=True)))
    events: dict[int, list[Event]] = defaultdict(list)
    for handle, event in engine.step():
        events[handle].append(event)
    others = {engine.submit(engine.prepare(world.request(world.lora(n)))): n for n in (2, 1, 0, 3)}
    while engine.has_work:
        for handle, event in engine.step():
            events[handle].append(event)
    engine.check()
    assert engine.stats().adapters.device_evictions, "there was no need to evict"
    assert tokens_of(events[started]) == world.answers[1]
    for handle, number in others.items():
        assert tokens_of(events[handle]) == world.answers[number], number


def test_a_module_outside_the_targets_is_not_dropped(world: World) -> None:
    engine = world.engine(lora={"target_modules": ("attn_q", "attn_k", "attn_v")})
    assert tokens_of(run(engine, world.request(world.lora(3)))[0]) == world.answers[3]
    with pytest.raises(RequestError, match=r"attn_dense|mlp_"):
        engine.submit(engine.prepare(world.request(world.lora(1))))


def test_prompts_of_one_salt_are_not_found_by_another(world: World) -> None:
    engine, lora = world.engine(), world.lora(1)

    def reused(salt: str) -> int:
        [events] = run(engine, world.request(lora, cache_salt=salt))
        assert tokens_of(events) == world.answers[1] and events[-1].metrics is not None
        return events[-1].metrics.kv_reused_blocks

    assert [reused("one"), reused("two"), reused("")] == [0, 0, 0]
    assert min(reused("one"), reused("two"), reused("")) > 0


def test_equal_adapters_of_two_tenants_share_memory_and_their_ids_stay_apart(world: World) -> None:
    """What is shared is bytes that both have sent; taking one away leaves the other."""
    engine = world.engine()
    for task_id in (11, 12):
        assert tokens_of(run(engine, world.request(world.lora(1, task_id)))[0]) == world.answers[1]
    assert engine.stats().adapters.host_adapters == 1
    assert tokens_of(run(engine, world.request(world.lora(2, 11)))[0]) == world.answers[2]
    assert tokens_of(run(engine, world.request(LoraInput(12)))[0]) == world.answers[1]
    assert tokens_of(run(engine, world.request(LoraInput(11)))[0]) == world.answers[2], "without tensors too"


@pytest.mark.parametrize(
    ("file", "content"),
    [("adapter_model.safetensors", b"\x08\0\0\0\0\0\0\0not JSON"), ("adapter_config.json", b"{")],
    ids=["header", "config"],
)
def test_an_error_names_its_own_adapter_and_no_path(
    world: World, tmp_path: Path, file: str, content: bytes
) -> None:
    engine = world.engine(lora={"catalog_dir": tmp_path})
    source = world.paths[1]
    assert source is not None
    for tenant in ("broken", "neighbour"):
        shutil.copytree(source, tmp_path / tenant)
    (tmp_path / "broken" / file).write_bytes(content)
    with pytest.raises(AdapterError) as error:
        lora = engine.adapters.library.resolve(LoraInput(None, name="broken"))
        engine.submit(engine.prepare(world.request(lora)))
    text = str(error.value)
    assert file in text and "neighbour" not in text and str(tmp_path) not in text
